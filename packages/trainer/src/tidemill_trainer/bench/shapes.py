"""Models with the sizes of public ones and random weights: what a benchmark needs of them, without a download."""

import json
import random
import string
from pathlib import Path
from typing import Any

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
}


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        **{name: value for name, value in _QWEN3.items() if name not in ("head_dim", "attention_bias")},
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-30b-a3b": _qwen3(2048, 6144, 48, 32, tied=False)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
}
"""Fields of `config.json` by the name of the model. Without an end token, a response has its maximum length."""
_DEMO = ("tiny", "created by the demo")


def write_inputs(config: Config, num_steps: int) -> list[str]:
    """Write what a configuration lacks, if its `model.path` is the name of a shape and no folder.

    The weights are not written: the training workers draw them and send them to the engines, as in every run.

    Args:
        config: the configuration.
        num_steps: steps of the run, each with problems of its own.

    Returns:
        Overrides with the paths of the model and, unless the configuration has them, of problems.

    Raises:
        ConfigError: `model.path` is neither a name nor a folder.
    """
    name, folder = config.model.path, Path(config.trainer.run_dir) / "shapes"
    if name in _DEMO:
        from tidemill_trainer.demo import write_assets

        return write_assets(folder / "tiny", config.trainer.seed)
    if Path(name).expanduser().is_dir():
        return []
    if name not in SHAPES:
        raise ConfigError(
            f"config key model.path: {name!r} is neither a folder with a model nor a model with random weights, which "
            f"are {', '.join(['tiny', *SHAPES])}"
        )
    target = write_config(name, folder)
    if not (target / "tokenizer.json").is_file():
        _write_tokenizer(target, SHAPES[name]["vocab_size"])
    overrides = [f"model.path={target}", "model.init_seed=0", 'rollout.engine_args.load_format="dummy"']
    if not config.data.train_files:
        file = target / "prompts.jsonl"
        write_prompts(file, config.data.train_batch_size * num_steps, config.data.max_prompt_length)
        overrides.append(f'data.train_files=["{file}"]')
    return overrides


def write_config(name: str, folder: Path) -> Path:
    """Write the `config.json` of a shape; return the folder of the model, which is its name in `folder`."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(SHAPES[name], indent=2))
    return target


def write_prompts(file: Path, count: int, length: int) -> None:
    """Write `count` prompts of `length` random characters, each of which is a token of `_write_tokenizer`."""
    rng = random.Random(0)
    letters = string.ascii_letters + string.digits + " "
    with file.open("w") as lines:
        for number in range(count):
            text = "".join(rng.choices(letters, k=length))
            lines.write(json.dumps({"prompt": text, "ground_truth": str(number), "data_source": "random"}) + "\n")


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with one token per byte, and words of five letters for the rest of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    number = 0
    while len(vocab) < vocab_size - 2:
        rest, letters = number, ""
        for _ in range(5):
            rest, letter = divmod(rest, 26)
            letters += string.ascii_lowercase[letter]
        vocab[letters] = len(vocab)
        number += 1
    vocab |= {"<|im_end|>": vocab_size - 2, "<|endoftext|>": vocab_size - 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(  # type: ignore[assignment]
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
