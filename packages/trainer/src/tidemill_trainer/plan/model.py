"""The sizes of a model, counted on the meta device: `config.json` is read, and no weights."""

from dataclasses import dataclass, replace

from tidemill_engines.config import ModelConfig
from tidemill_engines.fsdp2.lora import add_adapters
from tidemill_engines.fsdp2.model import build_model, decoder_layers, freeze
from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Numbers of parameters of a model, and the sizes of its layers.

    Attributes:
        total: all parameters; tied ones count once.
        trainable: parameters that the optimizer updates.
        root: parameters outside of the layers: embeddings, head and last norm.
        embedding: parameters of the embeddings.
        largest: parameters of the largest weight; the experts of a layer are one.
        has_tied_head: whether head and embeddings are one parameter.
        layer: parameters of the largest layer.
        experts: parameters of all routed experts.
        replicated: parameters of the layers that tensor-parallel ranks of Megatron do not share: norms and routers.
        num_layers: number of decoder layers.
        hidden: hidden size.
        query, key: size of all heads of queries, and of all heads of keys.
        cached: elements of the KV cache of a token in one layer.
        cached_heads: heads that tensor-parallel ranks of an engine divide the cache by; 1 for latent attention (MLA).
        inner: intermediate size of the MLP of a token: for a MoE model, that of all its experts.
        num_experts: routed experts of a layer; 0 for a dense model.
        num_copies: routed experts of a token; 0 for a dense model.
        vocab: size of the vocabulary.
    """

    total: int
    trainable: int
    root: int
    embedding: int
    largest: int
    has_tied_head: bool
    layer: int
    experts: int
    replicated: int
    num_layers: int
    hidden: int
    query: int
    key: int
    cached: int
    cached_heads: int
    inner: int
    num_experts: int
    num_copies: int
    vocab: int


def count_model(config: ModelConfig, *, is_value: bool = False) -> ModelSizes:
    """Count the parameters of the model at `config.path`.

    Args:
        is_value: the head has one output, as of critic and reward model.

    Raises:
        ValueError: the engines do not support the model.
    """
    model = build_model(replace(config, compile_layers=False))  # the compiler takes seconds to import
    freeze(model, config.frozen)
    if config.lora is not None:
        add_adapters(model, config.lora)
    text = model.config.get_text_config()
    params = dict(model.named_parameters())  # a tied head is not listed again
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    embedding = sum(p.numel() for p in model.get_input_embeddings().parameters())
    in_layers = [(name, p) for name, p in params.items() if ".layers." in name]
    experts = sum(p.numel() for name, p in in_layers if ".experts." in name)
    is_router = (".mlp.gate.weight", ".mlp.router.weight")
    replicated = sum(p.numel() for name, p in in_layers if p.dim() == 1 or name.endswith(is_router))
    total = sum(p.numel() for p in params.values())
    trainable = sum(p.numel() for p in params.values() if p.requires_grad)
    is_tied = bool(model.config.get_text_config().tie_word_embeddings)
    if is_value:  # `score.weight` and `score.bias` replace the head
        removed = 0 if is_tied else embedding
        total, trainable = total - removed + text.hidden_size + 1, trainable - removed + text.hidden_size + 1
    num_experts = max((p.shape[0] for name, p in in_layers if ".experts." in name), default=0)
    return ModelSizes(
        total=total,
        trainable=trainable,
        root=total - sum(layers),
        embedding=embedding,
        largest=max(p.numel() for p in params.values()),
        has_tied_head=is_tied,
        layer=max(layers, default=0),
        experts=experts,
        replicated=replicated,
        num_layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        **_attention(text),
        inner=_inner(text) if experts else text.intermediate_size,
        num_experts=num_experts,
        num_copies=text.num_experts_per_tok if experts else 0,
        vocab=text.vocab_size,
    )


def _attention(text: PretrainedConfig) -> dict[str, int]:
    """Return the sizes of attention; latent attention caches one vector and a rotary part for all heads."""
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None) is not None:
        size = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
        return {"query": size, "key": size, "cached": text.kv_lora_rank + text.qk_rope_head_dim, "cached_heads": 1}
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    key = text.num_key_value_heads * head_dim
    return {"query": heads * head_dim, "key": key, "cached": 2 * key, "cached_heads": text.num_key_value_heads}


def _inner(text: PretrainedConfig) -> int:
    """Return the intermediate size of all experts of a token, routed and shared."""
    size = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", None)
    if shared is None:
        shared = (getattr(text, "n_shared_experts", None) or 0) * size
    return text.num_experts_per_tok * size + shared
