"""Memory of one rank of a training engine, by kind, in bytes."""

from dataclasses import dataclass

from tidemill_engines import FSDP2Config, MegatronConfig, ModelConfig
from tidemill_engines.head.log_probs import CHUNK_BYTES

from tidemill_trainer.plan.model import ModelSizes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Memory of one rank, in bytes.

    Attributes:
        params: weights of this rank. FSDP2: P / n in `model.dtype`, n = `fsdp_size`. Megatron: those of its share of
            the model, in `param_dtype`.
        grads: gradients: FSDP2: as the trainable weights; gathered and in `reduce_dtype` with
            `reshard_after_forward=false`. Megatron: float32, for the rank's share of the model.
        optimizer: two moments (FSDP2: in `model.dtype`; Megatron: float32), and Megatron's float32 masters of bfloat16
            parameters; Megatron shards them over data-parallel ranks with `use_distributed_optimizer`.
        gathered: FSDP2: all-gathered weights in `param_dtype`: embeddings, head and two layers, and in training their
            gradients; all weights with `reshard_after_forward=false`.
        activations: what the backward pass of a full micro-batch reads, and the logits of a chunk of the head.
        inference: what the forward pass alone requires: two layers, and the logits of a chunk.
    """

    params: float
    grads: float
    optimizer: float
    gathered: float
    activations: float
    inference: float


def engine_memory(
    sizes: ModelSizes, model: ModelConfig, engine: FSDP2Config | MegatronConfig, world_size: int
) -> EngineMemory:
    """Return the memory of one rank of an engine on `world_size` ranks."""
    if isinstance(engine, FSDP2Config):
        return _fsdp2(sizes, model, engine, world_size)
    return _megatron(sizes, model, engine, world_size)


def _fsdp2(sizes: ModelSizes, model: ModelConfig, engine: FSDP2Config, world_size: int) -> EngineMemory:
    n = world_size if engine.fsdp_size == -1 else engine.fsdp_size
    master, item = ITEM_BYTES[model.dtype], ITEM_BYTES[engine.param_dtype]
    share = 0.0 if engine.offload_policy else master / n
    grads = share * sizes.trainable
    gathered = item * (2 * sizes.root + 3 * sizes.layer)
    if not engine.reshard_after_forward:
        grads = ITEM_BYTES[engine.reduce_dtype] * sizes.trainable
        gathered = item * sizes.total
    tokens = engine.max_token_len_per_gpu
    layer = _layer_bytes(sizes, _FUSED if model.compile_layers else _EAGER) * item / 2
    kept = layer * sizes.num_layers
    if model.gradient_checkpointing:
        per_layer = _layer_bytes(sizes, _SELECTIVE) if model.recompute == "selective" else 2 * sizes.hidden
        kept = per_layer * sizes.num_layers * item / 2 + layer
    return EngineMemory(
        params=share * sizes.total,
        grads=grads,
        optimizer=2 * share * sizes.trainable,
        gathered=gathered,
        activations=tokens * kept + head_bytes(sizes, tokens),
        inference=tokens * layer * 2 / 3 + head_bytes(sizes, tokens),
    )


def megatron_params(sizes: ModelSizes, engine: MegatronConfig) -> tuple[float, float]:
    """Return the parameters of a rank of the first pipeline stage: those that are no experts, and experts.

    Tensor-parallel ranks share all but norms and routers; pipeline stages share the layers; the first one has the
    embeddings. Without pipeline, the rank also has its part of the head.
    """
    tp, pp = engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size
    share = num_layers_of_stage(sizes, engine) / sizes.num_layers
    layers = sizes.total - sizes.root - sizes.experts
    root = sizes.embedding if pp > 1 else sizes.root - sizes.hidden
    others = share * ((layers - sizes.replicated) / tp + sizes.replicated) + root / tp
    others += sizes.hidden if pp == 1 else 0  # the norm before the head
    return others, share * sizes.experts / (engine.expert_model_parallel_size * engine.expert_tp)


def num_layers_of_stage(sizes: ModelSizes, engine: MegatronConfig) -> float:
    """Return the layers of the first pipeline stage."""
    pp, last = engine.pipeline_model_parallel_size, engine.num_layers_in_last_pipeline_stage
    return sizes.num_layers / pp if last is None else (sizes.num_layers - last) / (pp - 1)


def _megatron(sizes: ModelSizes, model: ModelConfig, engine: MegatronConfig, world_size: int) -> EngineMemory:
    tp, pp = engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size
    others, experts = megatron_params(sizes, engine)
    item = ITEM_BYTES[engine.param_dtype]
    state = 12 if engine.param_dtype == "bfloat16" else 8
    replicas, of_experts = 1.0, 1.0
    if engine.use_distributed_optimizer:
        replicas = world_size / (tp * pp)
        of_experts = world_size / (engine.expert_model_parallel_size * engine.expert_tp * pp)
    tokens = engine.max_token_len_per_gpu
    share = tp if engine.sequence_parallel else 1
    layer = _layer_bytes(sizes, _FUSED, tp=tp, share=share) * item / 2
    recomputed = engine.recomputed(model)
    per_layer, once = layer, 0.0
    if recomputed:
        kept = _MEGATRON_SELECTIVE if recomputed != ("full",) else (2, 0, 0, 0)
        per_layer, once = _layer_bytes(sizes, kept, tp=tp, share=share, has_copies=False) * item / 2, layer
    layers = num_layers_of_stage(sizes, engine) * pp  # one micro-batch in flight for each stage that follows
    return EngineMemory(
        params=item * (others + experts),
        grads=4 * (others + experts),
        optimizer=state * (others / replicas + experts / of_experts),
        gathered=0.0,
        activations=tokens * (per_layer * layers + once) + head_bytes(sizes, tokens, tp=tp),
        inference=tokens * layer * 2 / 3 + head_bytes(sizes, tokens, tp=tp),
    )


# Bytes of a token in one layer with bfloat16, as factors of the hidden size, the sizes of queries and of keys (= of
# values), and the intermediate size. They are the tensors that autograd keeps. Eager: two norms in float32 (8 each),
# norms and rotary embedding of queries and keys (10), attention's input and output, gate, up, their activation and
# their product (2 each). Fused (compiled layers, and Megatron): norms and activation are recomputed from their inputs.
# Within 7 % of the peaks measured on H200s, except 9 % for one of them (tests/plan/test_measured.py).
_EAGER = (16.0, 10.0, 10.0, 8.0)
_FUSED = (8.0, 6.0, 6.0, 6.0)
_SELECTIVE = (6.0, 4.0, 4.0, 4.0)
_MEGATRON_SELECTIVE = (4.0, 6.0, 6.0, 0.0)


def _layer_bytes(
    sizes: ModelSizes,
    factors: tuple[float, float, float, float],
    *,
    tp: int = 1,
    share: int = 1,
    has_copies: bool = True,
) -> float:
    """Return the bytes that a layer keeps for one token: a h + b q + c k + d f, and 2 h for each expert of the token.

    Args:
        sizes: sizes of the model.
        factors: a to d, in bytes.
        tp: tensor-parallel ranks, which share q, k and f.
        share: ranks that share h.
        has_copies: whether the inputs of the experts are kept.
    """
    a, b, c, d = factors
    copies = 2 * sizes.hidden * sizes.num_copies if has_copies else 0
    tp_of_experts = 1 if sizes.num_copies else tp  # the exchange gives a rank as many tokens as it has
    inner = d * sizes.inner / tp_of_experts
    return a * sizes.hidden / share + (b * sizes.query + c * sizes.key) / tp + inner + copies


def head_bytes(sizes: ModelSizes, tokens: float, *, tp: int = 1) -> float:
    """Return the bytes of the chunked head: logits of a chunk in float32 and bfloat16, and the float32 hidden gradient.

    A chunk has at most `CHUNK_BYTES` (512 MiB).
    """
    chunk = min(CHUNK_BYTES, 4 * tokens * sizes.vocab / tp)
    return 1.5 * chunk + 4 * tokens * sizes.hidden
