"""Tensor shapes of the models, and the number of bytes that must move between GPUs. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

ITEM_BYTES = 2
"""All weights are bfloat16."""

_COMMON: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

DENSE: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
}
"""Qwen3-8B: 399 tensors, 16.4 GB."""

MOE: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
}
"""Qwen3-30B-A3B with half of its layers: 9,435 tensors, 31.2 GB."""

TINY: dict[str, Any] = DENSE | {
    "vocab_size": 256,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

STD = 0.02
"""Standard deviation of the random values."""

T = TypeVar("T")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start of a part of a tensor, and its shape."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor under its Hugging Face name. `tp_dim` is the dim that tensor parallelism splits; None: replicated."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None

    @property
    def num_bytes(self) -> int:
        return _numel(self.shape) * ITEM_BYTES


def weights_of(config: dict[str, Any]) -> list[Weight]:
    """Return all tensors of a Qwen3 or Qwen3-MoE with this Hugging Face config, in the order of its layers."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    weights = [Weight("model.embed_tokens.weight", (vocab, hidden), 0)]
    for layer in range(config["num_hidden_layers"]):
        weights += _layer(config, f"model.layers.{layer}.")
    return [*weights, Weight("model.norm.weight", (hidden,), None), Weight("lm_head.weight", (vocab, hidden), 0)]


def _layer(config: dict[str, Any], prefix: str) -> Iterator[Weight]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield Weight(prefix + "input_layernorm.weight", (hidden,), None)
    yield Weight(prefix + "self_attn.q_proj.weight", (queries, hidden), 0)
    yield Weight(prefix + "self_attn.k_proj.weight", (keys, hidden), 0)
    yield Weight(prefix + "self_attn.v_proj.weight", (keys, hidden), 0)
    yield Weight(prefix + "self_attn.o_proj.weight", (hidden, queries), 1)
    yield Weight(prefix + "self_attn.q_norm.weight", (head,), None)
    yield Weight(prefix + "self_attn.k_norm.weight", (head,), None)
    yield Weight(prefix + "post_attention_layernorm.weight", (hidden,), None)
    if "num_experts" not in config:
        yield from _mlp(hidden, config["intermediate_size"], prefix + "mlp.")
        return
    yield Weight(prefix + "mlp.gate.weight", (config["num_experts"], hidden), None)
    for expert in range(config["num_experts"]):
        yield from _mlp(hidden, config["moe_intermediate_size"], f"{prefix}mlp.experts.{expert}.")


def _mlp(hidden: int, inner: int, prefix: str) -> Iterator[Weight]:
    yield Weight(prefix + "gate_proj.weight", (inner, hidden), 0)
    yield Weight(prefix + "up_proj.weight", (inner, hidden), 0)
    yield Weight(prefix + "down_proj.weight", (hidden, inner), 1)


def batches(items: Sequence[tuple[T, int]], max_bytes: int) -> list[list[T]]:
    """Split `(item, bytes)` into runs of at most `max_bytes`, or of one item."""
    runs: list[list[T]] = []
    used = max_bytes + 1
    for item, num_bytes in items:
        if used + num_bytes > max_bytes:
            runs.append([])
            used = 0
        runs[-1].append(item)
        used += num_bytes
    return runs


def rows_held(weights: Sequence[Weight], num_trainers: int) -> list[dict[str, list[Box]]]:
    """Return the parts of each tensor that each trainer rank holds, split along dim 0 as FSDP2 does."""
    held: list[dict[str, list[Box]]] = []
    for rank in range(num_trainers):
        parts = {weight.name: _part(weight.shape[0], rank, num_trainers) for weight in weights}
        held.append({w.name: [_rows_of(w.shape, parts[w.name])] for w in weights})
    return held


def moved_bytes(
    weights: Sequence[Weight],
    held: Sequence[dict[str, list[Box]]],
    tp_size: int,
    *,
    separate: bool,
    num_engines: int = 1,
) -> int:
    """Return the bytes that must enter or leave the busiest GPU, in one direction.

    Rank r of each engine needs part r of `tp_dim` of each tensor. The engines are on consecutive GPUs. Unless these are
    separate ones, trainer rank i and the i-th engine rank share one, and data that is there already does not move.
    Equal parts on several ranks are sent in turn.

    Args:
        held: parts of each tensor that each trainer rank holds.
    """
    received, sent = [0.0] * (num_engines * tp_size), [0.0] * len(held)
    for weight in weights:
        holders: dict[Box, list[int]] = {}
        for s, parts in enumerate(held):
            for box in parts.get(weight.name, []):
                holders.setdefault(box, []).append(s)
        for r in range(len(received)):
            needed = _needed(weight, r % tp_size, tp_size)
            for box, ranks in holders.items():
                if not separate and r in ranks:
                    continue
                num_bytes = _overlap(box, needed) * ITEM_BYTES
                received[r] += num_bytes
                for s in ranks:
                    sent[s] += num_bytes / len(ranks)
    return round(max(received + sent))


def needed_bytes(weights: Sequence[Weight], tp_size: int) -> int:
    """Return the bytes of the parameters of engine rank 0."""
    return sum(_numel(_needed(weight, 0, tp_size)[1]) * ITEM_BYTES for weight in weights)


def _needed(weight: Weight, rank: int, tp_size: int) -> Box:
    """Return the part of a tensor that an engine rank needs."""
    start, shape = [0] * len(weight.shape), list(weight.shape)
    if weight.tp_dim is not None:
        part = _part(shape[weight.tp_dim], rank, tp_size)
        start[weight.tp_dim], shape[weight.tp_dim] = part.start, len(part)
    return tuple(start), tuple(shape)


def _rows_of(shape: tuple[int, ...], rows: range) -> Box:
    return (rows.start, *(0,) * (len(shape) - 1)), (len(rows), *shape[1:])


def _overlap(a: Box, b: Box) -> int:
    """Return the number of elements in both boxes."""
    return _numel([max(0, min(i + n, j + m) - max(i, j)) for i, n, j, m in zip(a[0], a[1], b[0], b[1], strict=True)])


def _part(size: int, rank: int, num_ranks: int) -> range:
    chunk = -(-size // num_ranks)
    return range(min(rank * chunk, size), min((rank + 1) * chunk, size))


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
