"""Tiny random checkpoints in Hugging Face format."""

from pathlib import Path
from typing import Any

import torch

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def tiny_model(
    path: Path, family: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a random model to the folder `path` and return `path`.

    Args:
        family: "qwen2", "qwen3", "qwen3_moe" or "llama".
        overrides: fields of the family's Hugging Face config. Weights have a standard deviation of 0.1, so that logits
            differ clearly between tokens.
    """
    return _save(path, family, "ForCausalLM", seed, dtype, overrides)


def tiny_reward_model(path: Path, family: str = "qwen3", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 model for sequence classification with one label; see `tiny_model`."""
    return _save(path, family, "ForSequenceClassification", seed, torch.float32, {"num_labels": 1} | overrides)


def _save(path: Path, family: str, head: str, seed: int, dtype: torch.dtype, overrides: dict[str, Any]) -> Path:
    import transformers

    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama"}[family]
    config_cls, model_cls = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}{head}")
    fields = _DEFAULTS | ({} if family == "qwen2" else {"head_dim": 16}) | (_EXPERTS if "moe" in family else {})
    fields |= overrides
    config = config_cls(**fields, initializer_range=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_cls(config).to(dtype)
    model.save_pretrained(path)
    return path
