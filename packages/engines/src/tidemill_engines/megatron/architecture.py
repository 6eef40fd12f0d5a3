"""What the Megatron parts need to know of a Hugging Face model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DENSE = ("llama", "qwen2", "qwen3")
_EXPERTS = ("qwen3_moe",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The sizes of a causal language model, by the names of its `config.json` where they have one there.

    Attributes:
        num_experts: routed experts of each layer; 0 for a dense model.
        qkv_bias: whether the q, k and v projections have biases.
        qk_norm: whether q and k are normalized per head.

    Raises:
        ValueError: an architecture or a feature that no rule covers, named.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    initializer_range: float = 0.02

    @classmethod
    def read(cls, folder: Path) -> "Architecture":
        """From the `config.json` of a checkpoint.

        Raises:
            FileNotFoundError: there is none.
            ValueError: see the class.
        """
        file = folder / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"no config.json in {folder}; expected a model in Hugging Face format")
        return cls.from_config(json.loads(file.read_text()))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Architecture":
        """From the content of a `config.json`."""
        model_type = config.get("model_type", "")
        if model_type not in (*_DENSE, *_EXPERTS):
            known = ", ".join((*_DENSE, *_EXPERTS))
            raise ValueError(f"no rules for models of type {model_type!r}; the Megatron engine knows {known}")
        _refuse(config, model_type)
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or config
        experts = model_type in _EXPERTS
        return cls(
            model_type=model_type,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope["rope_theta"]),
            max_position_embeddings=config["max_position_embeddings"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=model_type == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
            num_experts=(config.get("num_experts") or config["num_local_experts"]) if experts else 0,
            num_experts_per_tok=config["num_experts_per_tok"] if experts else 0,
            moe_intermediate_size=config["moe_intermediate_size"] if experts else 0,
            norm_topk_prob=bool(config.get("norm_topk_prob", False)) if experts else True,
            initializer_range=config.get("initializer_range", 0.02),
        )


def _refuse(config: dict[str, Any], model_type: str) -> None:
    """Features that change the numbers and that nothing here carries out."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    unknown = {
        f"rope type {kind!r}": kind != "default",
        "sliding windows": bool(config.get("use_sliding_window", False)),
        "a bias of o_proj": model_type == "llama" and bool(config.get("attention_bias", False)),
        "biases in the mlp": bool(config.get("mlp_bias", False)),
        "layers without experts": bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1,
        f"activation {config.get('hidden_act', 'silu')!r}": config.get("hidden_act", "silu") != "silu",
    }
    found = [name for name, is_there in unknown.items() if is_there]
    if found:
        raise ValueError(f"the Megatron engine cannot train a {model_type} model with {', '.join(found)}")
