"""Core attention of Megatron's layers on packed rows."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from tidemill_engines.attention.packed import varlen_cuda, varlen_padded
from tidemill_engines.megatron.batch.packed import PackedRows
from tidemill_engines.megatron.parallel.context_parallel import PartLayout, context_parallel_attention
from tidemill_engines.megatron.patches.apply_rotary import apply_rotary


class PackedAttention(MegatronModule):
    """Rotary embedding and causal attention within each packed row, or within this context-parallel rank's part of it.

    Without Transformer Engine, Megatron's own attention supports neither packed rows nor context parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        self._group = pg_collection.cp
        self._fused = config.bias_activation_fusion
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """
        Args:
            query: [n, H, D].
            key: [n, H_kv, D].
            value: [n, H_kv, D_v], with D_v <= D.
            attention_mask: not used; the rows define what tokens attend to.
            packed_seq_params: a `PackedRows`; its `rotary` is None if queries and keys are rotated already.

        Returns:
            [n, H * D_v].
        """
        assert isinstance(packed_seq_params, PackedRows)
        layout, rotary = packed_seq_params.layout, packed_seq_params.rotary
        assert layout is not None
        if rotary is not None:
            query, key = (apply_rotary(x, *rotary, fused=self._fused) for x in (query, key))
        value_dim = value.shape[-1]
        if value_dim < query.shape[-1]:  # kernels require the same size for all
            value = F.pad(value, (0, query.shape[-1] - value_dim))
        if isinstance(layout, PartLayout):
            out = context_parallel_attention(query, key, value, layout, self._scale, self._group)
        elif query.is_cuda and query.dtype == torch.bfloat16:
            out = varlen_cuda(query, key, value, layout, self._scale, None)
        else:
            out = varlen_padded(query, key, value, layout, self._scale, None)
        return out[..., :value_dim].flatten(1)
