"""What the Megatron parts need to know of a Hugging Face model."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_DENSE = ("llama", "qwen2", "qwen3")
_EXPERTS = ("qwen3_moe",)
_LATENT = ("deepseek_v3",)
_YARN = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention, by the names of `config.json`.

    Attributes:
        q_lora_rank: None where queries are projected at once.
        yarn: of the rotary embedding, by the names of `rope_parameters`; empty where it is not scaled.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    yarn: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmoidRouter:
    """How DeepSeek-V3 chooses experts: by sigmoids and a bias, in some of the groups of experts."""

    num_groups: int
    top_groups: int
    scaling_factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The sizes of a causal language model, by the names of its `config.json` where they have one there.

    Attributes:
        head_dim: of queries and keys.
        num_experts: routed experts of each layer; 0 for a dense model.
        num_dense_layers: the first layers, which have no experts, of a mixture.
        shared_intermediate_size: of the experts that all tokens are sent to; 0 where there are none.
        router: None for a softmax.
        latent: None for attention to heads of their own.
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
    num_dense_layers: int = 0
    shared_intermediate_size: int = 0
    router: SigmoidRouter | None = None
    latent: LatentAttention | None = None

    @classmethod
    def read(cls, folder: Path) -> "Architecture":
        """From the `config.json` of a checkpoint.

        Raises:
            FileNotFoundError: there is none.
            ValueError: see the class.
        """
        file = folder / "config.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"expected a local folder with a Hugging Face model, but {str(folder)!r} has no config.json; "
                "download one first, for example with `hf download ORG/MODEL --local-dir FOLDER`"
            )
        try:
            config = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Architecture":
        """From the content of a `config.json`."""
        model_type = config.get("model_type", "")
        if model_type not in (*_DENSE, *_EXPERTS, *_LATENT):
            known = ", ".join((*_DENSE, *_EXPERTS, *_LATENT))
            raise ValueError(f"no rules for models of type {model_type!r}; the Megatron engine knows {known}")
        _refuse(config, model_type)
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or config
        experts = model_type in _EXPERTS
        architecture = cls(
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
        return replace(architecture, **_of_latent(config)) if model_type in _LATENT else architecture


def _of_latent(config: dict[str, Any]) -> dict[str, Any]:
    """What DeepSeek-V3 has instead."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    attention = LatentAttention(
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        yarn=tuple((name, rope[name]) for name in _YARN if name in rope),
    )
    return {
        "head_dim": attention.qk_nope_head_dim + attention.qk_rope_head_dim,
        "latent": attention,
        "num_experts": config["n_routed_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "moe_intermediate_size": config["moe_intermediate_size"],
        "num_dense_layers": config["first_k_dense_replace"],
        "shared_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
        "router": SigmoidRouter(
            num_groups=config["n_group"],
            top_groups=config["topk_group"],
            scaling_factor=config["routed_scaling_factor"],
        ),
    }


def _refuse(config: dict[str, Any], model_type: str) -> None:
    """Features that change the numbers and that nothing here carries out."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    is_latent = model_type in _LATENT
    unknown = {
        f"rope type {kind!r}": kind not in (("default", "yarn") if is_latent else ("default",)),
        "sliding windows": bool(config.get("use_sliding_window", False)),
        "a bias of o_proj": model_type in ("llama", *_LATENT) and bool(config.get("attention_bias", False)),
        "biases in the mlp": bool(config.get("mlp_bias", False)),
        "layers without experts": bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1,
        "weights of experts that do not add up to one": model_type in _LATENT
        and not config.get("norm_topk_prob", True),
        "rotary pairs that lie apart": model_type in _LATENT and not config.get("rope_interleave", True),
        "groups of experts of which other than two decide": _decides_otherwise(config, model_type),
        f"activation {config.get('hidden_act', 'silu')!r}": config.get("hidden_act", "silu") != "silu",
    }
    found = [name for name, is_there in unknown.items() if is_there]
    if found:
        raise ValueError(f"the Megatron engine cannot train a {model_type} model with {', '.join(found)}")


def _decides_otherwise(config: dict[str, Any], model_type: str) -> bool:
    """Megatron chooses groups by their best `top_k // top_groups` experts, transformers by their best two."""
    if model_type not in _LATENT or config["n_group"] == 1:
        return False
    return config["num_experts_per_tok"] // config["topk_group"] != 2
