"""Names of weights: which tensors of a Hugging Face checkpoint are in which parameter of a Megatron rank.

`_RULES` at the end of this file is the table of names. To support another model, add a rule for each parameter of
Megatron whose Hugging Face name or layout differs, and its `config.json` to `tidemill_engines.megatron.architecture`.
"""

import re
from collections.abc import Callable

from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.weights.placement import Block, Part, Placement

Rule = Callable[[Architecture, Placement, str, "re.Match[str]"], list[Block]]


def blocks_of(parameter: str, architecture: Architecture, placement: Placement) -> list[Block]:
    """Return the parts of checkpoint tensors that a rank's parameter consists of. Rows without one are padding.

    Args:
        parameter: Megatron's name, with the number of the layer in the whole model
            (`decoder.layers.7.mlp.linear_fc1.weight`) and that of the expert among the experts of the rank.

    Raises:
        ValueError: no rule covers the parameter, or its sizes are not divisible by the number of ranks.
    """
    for pattern, rule in _RULES:
        match = re.fullmatch(pattern, parameter)
        if match:
            layer = match.groupdict().get("layer")
            prefix = "model." if layer is None else f"model.layers.{layer}."
            return rule(architecture, placement, prefix, match)
    raise ValueError(
        f"expected a rule for Megatron's parameter {parameter!r}, found none, so its weights can be neither loaded nor "
        "exported; add one to _RULES in tidemill_engines/megatron/weights/names.py"
    )


def _whole(name: str, *shape: int) -> list[Block]:
    return [Block(name=name, global_shape=shape, start=(0,) * len(shape), shape=shape, row=0)]


def _rows(name: str, shape: tuple[int, ...], start: int, length: int, row: int) -> Block:
    rest = shape[1:]
    return Block(name=name, global_shape=shape, start=(start, *(0,) * len(rest)), shape=(length, *rest), row=row)


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Number of rows of Megatron's embedding, the same for each tensor-parallel rank."""
    return -(-vocab_size // tp_size) * tp_size


def _vocabulary(name: str) -> Rule:
    def rule(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
        start, length = p.tp.of(padded_vocab_size(a.vocab_size, p.tp.size), "rows")
        length = min(start + length, a.vocab_size) - start
        return [_rows(name, (a.vocab_size, a.hidden_size), start, length, 0)] if length > 0 else []

    return rule


def _norm(name: str, size: Callable[[Architecture], int]) -> Rule:
    return lambda a, p, prefix, match: _whole(prefix + name, size(a))


def _score(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    return _whole(match[0], *((1, a.hidden_size) if match["kind"] == "weight" else (1,)))


def _router(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    return _whole(prefix + "mlp.gate.weight", a.num_experts, a.hidden_size)


def _qkv(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    """Group by group: the q heads that share a kv head, then this k head and v head."""
    per_group = a.num_attention_heads // a.num_key_value_heads * a.head_dim
    first, count = p.tp.of(a.num_key_value_heads, "key and value heads")
    rest = (a.hidden_size,) if match["kind"] == "weight" else ()
    blocks = []
    for index in range(count):
        row = index * (per_group + 2 * a.head_dim)
        for part, rows in (("q", per_group), ("k", a.head_dim), ("v", a.head_dim)):
            shape = (rows * a.num_key_value_heads, *rest)
            name = f"{prefix}self_attn.{part}_proj.{match['kind']}"
            blocks.append(_rows(name, shape, (first + index) * rows, rows, row))
            row += rows
    return blocks


def _columns(name: str, width: int, height: int, part: Part) -> list[Block]:
    """A matrix [height, width] split by columns."""
    start, length = part.of(width, f"columns of {name}")
    return [Block(name=name, global_shape=(height, width), start=(0, start), shape=(height, length), row=0)]


def _gate_and_up(module: str, height: int, width: int, part: Part) -> list[Block]:
    start, length = part.of(height, f"rows of {module}.gate_proj")
    return [
        _rows(f"{module}.{name}.weight", (height, width), start, length, index * length)
        for index, name in enumerate(("gate_proj", "up_proj"))
    ]


def _rows_of(name: str, height: int, width: int, part: Part) -> list[Block]:
    """A matrix [height, width] split by rows."""
    start, length = part.of(height, f"rows of {name}")
    return [_rows(name, (height, width), start, length, 0)]


def _latent(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    latent = a.latent
    if latent is None:
        raise ValueError(f"{match[0]!r} belongs to latent attention (MLA), which a {a.model_type} model does not have")
    q_rank, kv_rank = latent.q_lora_rank or 0, latent.kv_lora_rank
    value_size = a.num_attention_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    name, height, width = {
        "q_proj": ("q_proj", a.num_attention_heads * a.head_dim, a.hidden_size),
        "q_down_proj": ("q_a_proj", q_rank, a.hidden_size),
        "q_up_proj": ("q_b_proj", a.num_attention_heads * a.head_dim, q_rank),
        "kv_down_proj": ("kv_a_proj_with_mqa", kv_rank + latent.qk_rope_head_dim, a.hidden_size),
        "kv_up_proj": ("kv_b_proj", value_size, kv_rank),
    }[match["part"]]
    part = Part() if "down" in match["part"] else p.tp
    return _rows_of(f"{prefix}self_attn.{name}.weight", height, width, part)


def _query_norm(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    if a.latent is None:
        return _whole(prefix + "self_attn.q_norm.weight", a.head_dim)
    return _whole(prefix + "self_attn.q_a_layernorm.weight", a.latent.q_lora_rank or 0)


def _latent_norm(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    return _whole(prefix + "self_attn.kv_a_layernorm.weight", 0 if a.latent is None else a.latent.kv_lora_rank)


def _shared_expert(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    module = f"{prefix}mlp.shared_experts"
    if match["fc"] == "1":
        return _gate_and_up(module, a.shared_intermediate_size, a.hidden_size, p.tp)
    return _columns(f"{module}.down_proj.weight", a.shared_intermediate_size, a.hidden_size, p.tp)


def _router_bias(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    return _whole(prefix + "mlp.gate.e_score_correction_bias", a.num_experts)


def _attention_output(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    value_size = a.head_dim if a.latent is None else a.latent.v_head_dim
    return _columns(f"{prefix}self_attn.o_proj.weight", a.num_attention_heads * value_size, a.hidden_size, p.tp)


def _mlp_in(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    return _gate_and_up(f"{prefix}mlp", a.intermediate_size, a.hidden_size, p.tp)


def _mlp_out(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    return _columns(f"{prefix}mlp.down_proj.weight", a.intermediate_size, a.hidden_size, p.tp)


def _expert(a: Architecture, p: Placement, prefix: str, match: "re.Match[str]") -> list[Block]:
    first, count = p.ep.of(a.num_experts, "experts")
    local = int(match["expert"])
    if local >= count:
        raise ValueError(
            f"{match[0]!r}: the expert must be below {count}, because each rank has {count} of {a.num_experts} experts"
        )
    module = f"{prefix}mlp.experts.{first + local}"
    if match["fc"] == "1":
        return _gate_and_up(module, a.moe_intermediate_size, a.hidden_size, p.etp)
    return _columns(f"{module}.down_proj.weight", a.moe_intermediate_size, a.hidden_size, p.etp)


def _hidden(a: Architecture) -> int:
    return a.hidden_size


def _head(a: Architecture) -> int:
    return a.head_dim


_L = r"decoder\.layers\.(?P<layer>\d+)\."
# Names with and without Transformer Engine, which merges a norm into the linear layer that follows it.
_RULES: tuple[tuple[str, Rule], ...] = (
    (r"embedding\.word_embeddings\.weight", _vocabulary("model.embed_tokens.weight")),
    (r"output_layer\.weight", _vocabulary("lm_head.weight")),
    (r"score\.(?P<kind>weight|bias)", _score),  # head of a value model
    (r"decoder\.final_layernorm\.weight", _norm("norm.weight", _hidden)),
    (
        _L + r"(input_layernorm\.|self_attention\.linear_qkv\.layer_norm_)weight",
        _norm("input_layernorm.weight", _hidden),
    ),
    (
        _L + r"(pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)weight",
        _norm("post_attention_layernorm.weight", _hidden),
    ),
    (_L + r"self_attention\.q_layernorm\.weight", _query_norm),
    (_L + r"self_attention\.kv_layernorm\.weight", _latent_norm),
    (_L + r"self_attention\.linear_(?P<part>q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj)\.weight", _latent),
    (_L + r"self_attention\.k_layernorm\.weight", _norm("self_attn.k_norm.weight", _head)),
    (_L + r"self_attention\.linear_qkv\.(?P<kind>weight|bias)", _qkv),
    (_L + r"self_attention\.linear_proj\.weight", _attention_output),
    (_L + r"mlp\.linear_fc1\.weight", _mlp_in),
    (_L + r"mlp\.linear_fc2\.weight", _mlp_out),
    (_L + r"mlp\.router\.weight", _router),
    (_L + r"mlp\.router\.expert_bias", _router_bias),
    (_L + r"mlp\.shared_experts\.linear_fc(?P<fc>[12])\.weight", _shared_expert),
    (_L + r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.linear_fc(?P<fc>[12])\.weight", _expert),
    (_L + r"mlp\.experts\.linear_fc(?P<fc>[12])\.weight(?P<expert>\d+)", _expert),
)
