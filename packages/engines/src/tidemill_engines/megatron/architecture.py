"""Architecture of a Hugging Face model, read from its `config.json`, as far as Megatron needs it."""

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig

from tidemill_engines.megatron.rotary import FIXED_TYPES, Rotary

_DENSE = ("llama", "qwen2", "qwen3")
_EXPERTS = ("qwen3_moe",)
_LATENT = ("deepseek_v3",)
_YARN = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA), with the names of `config.json`.

    Attributes:
        q_lora_rank: rank of the query projection; None if queries are projected by one matrix.
        rope_theta: base of the rotary embedding.
        yarn: YaRN parameters of the rotary embedding, with the names of `rope_parameters`; empty without YaRN.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    yarn: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmoidRouter:
    """DeepSeek-V3's router: sigmoid scores with a bias, and experts chosen within the best groups."""

    num_groups: int
    top_groups: int
    scaling_factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Sizes of a causal language model, with the names of its `config.json` where they have one.

    Attributes:
        head_dim: size of a head of queries and keys.
        rotary: rotary embedding; None for MLA, where Megatron applies it.
        num_experts: routed experts of each layer; 0 for a dense model.
        num_dense_layers: number of first layers without experts, of a MoE model.
        num_nextn_predict_layers: multi-token prediction (MTP) layers, which follow the others in the checkpoint and are
            ignored.
        shared_intermediate_size: intermediate size of the shared experts; 0 if there are none.
        router: None for a softmax router.
        latent: None for multi-head attention.
        qkv_bias: whether the q, k and v projections have biases.
        qk_norm: whether q and k are normalized per head.

    Raises:
        ValueError: an unsupported architecture or feature, named; or a value that transformers rejects.
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
    rotary: Rotary | None
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
    num_nextn_predict_layers: int = 0
    shared_intermediate_size: int = 0
    router: SigmoidRouter | None = None
    latent: LatentAttention | None = None

    @classmethod
    def read(cls, folder: Path) -> "Architecture":
        """Read the `config.json` of a checkpoint.

        Raises:
            FileNotFoundError: the folder has no `config.json`.
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
        """Architecture from the content of a `config.json`; missing values have the defaults of transformers."""
        model_type = config.get("model_type", "")
        if model_type not in (*_DENSE, *_EXPERTS, *_LATENT):
            known = ", ".join((*_DENSE, *_EXPERTS, *_LATENT))
            raise ValueError(
                f"the Megatron engine does not support model_type {model_type!r}; it supports {known}; use one of "
                "them or the fsdp2 engine"
            )
        checked = _check_config(config, model_type)
        fields = checked.to_dict()
        _refuse_unsupported(fields, model_type)
        experts = model_type in _EXPERTS
        architecture = cls(
            model_type=model_type,
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_hidden_layers=fields["num_hidden_layers"],
            num_attention_heads=fields["num_attention_heads"],
            num_key_value_heads=fields["num_key_value_heads"],
            head_dim=fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
            rms_norm_eps=fields["rms_norm_eps"],
            rotary=None,
            max_position_embeddings=fields["max_position_embeddings"],
            tie_word_embeddings=fields["tie_word_embeddings"],
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
            num_experts=fields["num_local_experts"] if experts else 0,
            num_experts_per_tok=fields["num_experts_per_tok"] if experts else 0,
            moe_intermediate_size=fields["moe_intermediate_size"] if experts else 0,
            norm_topk_prob=fields["norm_topk_prob"] if experts else True,
            initializer_range=fields["initializer_range"],
        )
        if model_type in _LATENT:
            return replace(architecture, **_latent_fields(fields))
        return replace(architecture, rotary=Rotary.from_config(checked, architecture.head_dim))


def _check_config(config: dict[str, Any], model_type: str) -> PretrainedConfig:
    """Return the config as transformers reads it: with its defaults, and `rope_parameters` for every older format."""
    try:
        return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(config))
    except (KeyError, StrictDataclassError) as error:
        raise ValueError(f"config.json is not valid for model_type {model_type!r}: {error.args[0]}") from error


def _latent_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Architecture` that differ for DeepSeek-V3."""
    rope = config["rope_parameters"]
    attention = LatentAttention(
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        rope_theta=float(rope["rope_theta"]),
        yarn=tuple((name, rope[name]) for name in _YARN if rope.get(name) is not None),
    )
    return {
        "head_dim": attention.qk_nope_head_dim + attention.qk_rope_head_dim,
        "latent": attention,
        "num_experts": config["n_routed_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "moe_intermediate_size": config["moe_intermediate_size"],
        "num_dense_layers": config["first_k_dense_replace"],
        "num_nextn_predict_layers": config.get("num_nextn_predict_layers") or 0,
        "shared_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
        "router": SigmoidRouter(
            num_groups=config["n_group"],
            top_groups=config["topk_group"],
            scaling_factor=config["routed_scaling_factor"],
        ),
    }


def _refuse_unsupported(config: dict[str, Any], model_type: str) -> None:
    """Raise ValueError for features that change results and are not implemented here."""
    rope, is_latent = config["rope_parameters"], model_type in _LATENT
    kind = rope.get("rope_type")
    unknown = {
        f"rope type {kind!r}": kind not in (("default", "yarn") if is_latent else FIXED_TYPES),
        "a partial rotary embedding (partial_rotary_factor)": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "YaRN scaling that differs from Megatron's": is_latent and kind == "yarn" and _is_other_yarn(rope),
        "attention dropout": bool(config["attention_dropout"]),
        "sliding windows": bool(config.get("use_sliding_window", False))
        or any(kind != "full_attention" for kind in config.get("layer_types") or ()),
        "a bias in o_proj": model_type != "qwen2" and bool(config.get("attention_bias", False)),
        "biases in the mlp": bool(config.get("mlp_bias", False)),
        "single layers without experts (mlp_only_layers or decoder_sparse_step)": bool(config.get("mlp_only_layers"))
        or config.get("decoder_sparse_step", 1) != 1,
        "expert weights that are not normalized (norm_topk_prob=false)": is_latent and not config["norm_topk_prob"],
        "rotary pairs that are not interleaved (rope_interleave=false)": is_latent and not config["rope_interleave"],
        "expert groups that are not ranked by their best two experts": is_latent and _ranks_groups_otherwise(config),
        f"activation {config['hidden_act']!r}": config["hidden_act"] != "silu",
    }
    found = [name for name, is_there in unknown.items() if is_there]
    if found:
        raise ValueError(
            f"the Megatron engine does not support a {model_type} model with {', '.join(found)}; use the fsdp2 engine"
        )


def _is_other_yarn(rope: dict[str, Any]) -> bool:
    """Megatron has no attention factor besides these two, of which transformers uses both or neither."""
    mscales = [rope.get("mscale"), rope.get("mscale_all_dim")]
    is_supported = all(mscales) or mscales == [None, None]
    return not is_supported or rope.get("attention_factor") is not None or not rope.get("truncate", True)


def _ranks_groups_otherwise(config: dict[str, Any]) -> bool:
    """Megatron ranks groups by their best `top_k // top_groups` experts, transformers by their best two."""
    return config["n_group"] != 1 and config["num_experts_per_tok"] // config["topk_group"] != 2
