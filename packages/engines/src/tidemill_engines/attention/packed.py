"""Causal attention over packed rows, registered with transformers as "tidemill_varlen"."""

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface, PretrainedConfig

from tidemill_engines.attention.ulysses import heads_to_tokens, tokens_to_heads
from tidemill_engines.model_io import PackedLayout

NAME = "tidemill_varlen"
_WINDOW_IN_MASK = {"phimoe", "qwen2_moe"}
"""Model types of transformers whose sliding window is only in the attention mask, which packed rows do not have."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
HAS_CUDNN = importlib.util.find_spec("cudnn") is not None
"""Whether cuDNN's graph API (nvidia-cudnn-frontend, the extra `cudnn`) is installed."""


def check_attention(config: PretrainedConfig, *, is_stateful: bool = False) -> None:
    """Check that a model computes the same on packed rows as on each row alone.

    Args:
        config: configuration of the model.
        is_stateful: whether transformers says that the model has a recurrent state.

    Raises:
        ValueError: a layer mixes tokens by something other than full or sliding attention.
    """
    text = config.get_text_config()
    fields = text.to_dict()
    kinds = {kind for key in ("layer_types", "layers_block_type", "block_types") for kind in fields.get(key) or ()}
    others = sorted(kinds - _LAYER_TYPES) or (["recurrent"] if is_stateful else [])
    if others:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(others)}, which would mix the tokens of packed rows; "
            f"use a model with only {' and '.join(sorted(_LAYER_TYPES))} layers"
        )


def check_packed_attention(config: PretrainedConfig, *, is_supported: bool) -> None:
    """Check that a model computes its attention with `varlen_attention_forward` if that is configured.

    Args:
        is_supported: whether transformers lets others replace the attention of the model.

    Raises:
        ValueError: it does not, or without its sliding window.
    """
    fields = config.get_text_config().to_dict()
    window, reason = fields.get("sliding_window"), None
    if not is_supported:
        reason = "has an attention that transformers does not let others replace (_supports_attention_backend)"
    elif config.model_type in _WINDOW_IN_MASK and window and window < fields["max_position_embeddings"]:
        reason = f"does not pass its sliding_window of {window} to it"
    if reason is not None:
        raise ValueError(
            f"ModelConfig.attn_implementation='varlen' does not support {config.model_type}, which {reason}; set it to "
            "'sdpa' or 'eager'"
        )


def max_unscaled(config: PretrainedConfig, *, is_packed: bool) -> int | None:
    """Return the most tokens of a row whose rotary angles do not depend on other rows; None if they never do.

    transformers chooses the angles of "longrope" by the longest of packed rows. It changes those of "dynamic" at a long
    row, and keeps them for the shorter rows that follow.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limits = []
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # or one for each type of layers
        if each.get("rope_type") == "dynamic":
            limits.append(text.max_position_embeddings)
        elif each.get("rope_type") == "longrope" and is_packed:
            limits.append(each["original_max_position_embeddings"])
    return min(limits, default=None)


def register_attention() -> None:
    """Register `attn_implementation="tidemill_varlen"` with transformers. Idempotent."""
    AttentionInterface.register(NAME, varlen_attention_forward)


def varlen_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tidemill_layout: PackedLayout,
    tidemill_group: dist.ProcessGroup | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each row of a packed micro-batch; signature of transformers' attention registry.

    Args:
        query: [1, H, n, D]; key and value: [1, H_kv, n, D], where H_kv divides H.
        attention_mask: must be None; the layout replaces it.
        tidemill_group: ranks that share the rows; the n tokens are this rank's part. None: n is all tokens.
        dropout: must be 0 on CUDA, where it is not supported.
        sliding_window: number of tokens that a token attends to, including itself; None is all before it in its row.
        softcap, s_aux: bound of the scores and attention sinks; not supported.

    Returns:
        The output [1, n, H, D], and None for the weights.

    Raises:
        ValueError: attention that is not causal, a mask, a softcap or sinks, or dropout on CUDA.
    """
    if attention_mask is not None:
        raise ValueError(
            f"{NAME} requires packed rows without an attention mask; {type(module).__name__} passes one of shape "
            f"{tuple(attention_mask.shape)}. Set ModelConfig.attn_implementation to 'eager'"
        )
    if not getattr(module, "is_causal", True):  # as transformers' own attention functions read it
        raise ValueError(
            f"{NAME} requires causal attention, and {type(module).__name__} is bidirectional; use a causal language "
            "model (some require is_decoder=true in config.json)"
        )
    if softcap is not None or s_aux is not None:
        raise ValueError(
            f"{NAME} does not support softcap or attention sinks, which {type(module).__name__} requires; set "
            "ModelConfig.attn_implementation to 'eager'"
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if tidemill_group is not None:
        q, k, v = tokens_to_heads(q, k, v, tidemill_group)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        if dropout:
            raise ValueError(f"{NAME} does not support dropout on CUDA; set attention_dropout to 0, got {dropout}")
        out = varlen_cuda(q, k, v, tidemill_layout, scaling, sliding_window)
    else:
        out = varlen_padded(q, k, v, tidemill_layout, scaling, sliding_window, dropout)
    if tidemill_group is not None:
        out = heads_to_tokens(out, tidemill_group)
    return out.unsqueeze(0), None


def varlen_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Compute variable-length attention in half precision on CUDA, with cuDNN or torch; shapes as `varlen_padded`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if takes_cudnn(q, sliding_window):
        from tidemill_engines.attention.cudnn import cudnn_attention

        return cudnn_attention(q, k, v, layout.cu_seqlens, layout.max_length, scaling)
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if sliding_window is None else sliding_window - 1
    out = varlen_attn(
        q,
        k,
        v,
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.max_length,
        layout.max_length,
        scale=scaling,
        window_size=(left, 0),
    )
    assert isinstance(out, torch.Tensor)
    return out


def takes_cudnn(q: torch.Tensor, sliding_window: int | None) -> bool:
    """Return whether cuDNN computes the attention.

    It requires the extra `cudnn`, a Hopper or data-center Blackwell GPU, no sliding window, and heads of at most 128.
    """
    num_tokens, num_heads, head_dim = q.shape
    return (
        HAS_CUDNN
        and sliding_window is None
        and torch.cuda.get_device_capability(q.device)[0] in (9, 10)
        and head_dim <= 128
        and head_dim % 8 == 0
        and num_tokens * num_heads * head_dim < 2**31  # offsets in a tensor are int32
    )


def varlen_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute attention on a right-padded [B, H, L, D] copy, for devices and dtypes without a varlen kernel.

    The padding follows all real tokens of a row, so the causal mask excludes it. Only the attention is padded; all
    other layers run on the N real tokens.

    Args:
        q: [N, H, D]; k and v: [N, H_kv, D].

    Returns:
        [N, H, D].
    """
    num_rows, length = layout.num_rows, layout.max_length

    def pad(x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(num_rows * length, *x.shape[1:]).index_copy(0, layout.padded_index, x)
        return padded.view(num_rows, length, *x.shape[1:]).transpose(1, 2)

    mask = None
    if sliding_window is not None and sliding_window < length:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
    out = F.scaled_dot_product_attention(
        pad(q),
        pad(k),
        pad(v),
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, layout.padded_index)
