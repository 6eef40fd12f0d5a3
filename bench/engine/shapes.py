"""The benchmark's models, as fields of Hugging Face's `config.json`."""

from typing import Any

from weight_update.shapes import MOE

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "sliding_window": None,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


_MOE: dict[str, Any] = MOE | {"max_position_embeddings": 40960, "initializer_range": 0.02}

MODELS: dict[str, dict[str, Any]] = {
    "0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "moe": _MOE,
    "moe16": _MOE | {"num_hidden_layers": 16},
    "tiny": _qwen3(64, 128, 4, 4, tied=True) | {"vocab_size": 512, "head_dim": 16, "num_key_value_heads": 2},
}
"""Qwen3 in four sizes, Qwen3-30B-A3B with a third and with half of its layers, and a tiny one for CPU tests."""
