"""A tiny Qwen3 with random weights and a character tokenizer."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_SPECIAL = ("<pad>", "<eos>", "<unk>")


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token for each of `characters`, and <pad>, <eos>, <unk>."""
    vocab = {token: number for number, token in enumerate((*_SPECIAL, *characters))}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
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
        eos_token_id=_SPECIAL.index("<eos>"),
        pad_token_id=_SPECIAL.index("<pad>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def write_model(folder: Path, characters: str, *, max_length: int, seed: int) -> None:
    """Write tokenizer and model to `folder` in Hugging Face format."""
    tokenizer = character_tokenizer(characters)
    tiny_qwen3(tokenizer, max_length=max_length, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
