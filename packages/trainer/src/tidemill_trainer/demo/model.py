"""A tiny Qwen3 with random weights and a tokenizer of whole pieces of text."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_PAD_ID, _EOS_ID = 0, 1


def piece_tokenizer(
    pieces: Iterable[str],
    *,
    eos_token: str = "<eos>",
    special_tokens: Sequence[str] = (),
    chat_template: str | None = None,
) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token for each of `pieces`, such as the characters of a string.

    Args:
        pieces: texts; where several fit, the longest one is taken.
        eos_token: end token.
        special_tokens: further special tokens besides <pad>, <unk> and the end token.
        chat_template: chat template.
    """
    pieces = list(pieces)
    special = ["<pad>", eos_token, "<unk>", *special_tokens]  # the first two have _PAD_ID and _EOS_ID
    vocab = {token: number for number, token in enumerate([*special, *pieces])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    longest_first = sorted(pieces, key=len, reverse=True)
    pattern = Regex("|".join([*map(re.escape, longest_first), r"[\s\S]"]))
    tokenizer.pre_tokenizer = Split(pattern, behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=eos_token,
        unk_token="<unk>",
        additional_special_tokens=list(special_tokens),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def tiny_qwen3(tokenizer: PreTrainedTokenizerFast, *, max_length: int, seed: int) -> Qwen3ForCausalLM:
    """Create a Qwen3 with 0.8 million random float32 parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_EOS_ID,
        pad_token_id=_PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast, *, max_length: int, seed: int) -> None:
    """Write tokenizer and model to `folder` in Hugging Face format."""
    tiny_qwen3(tokenizer, max_length=max_length, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
