"""Modules that Megatron's layers are made of where its own need Transformer Engine."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from tidemill_engines.attention.packed import varlen_cuda, varlen_padded
from tidemill_engines.megatron.batch.packed import PackedRows
from tidemill_engines.megatron.parallel.context_parallel import PartLayout, context_parallel_attention
from tidemill_engines.megatron.patches.rms_norm import rms_norm
from tidemill_engines.megatron.rotary import rotate


class RMSNorm(torch.nn.RMSNorm):
    """As Megatron's, which refuses sequence parallelism: there each rank has the gradient of its tokens only, and
    Megatron adds those of weights that are marked so."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._is_fused = config.bias_activation_fusion
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_fused:
            return super().forward(x)
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Rotary embedding and causal attention within each of the packed rows, of which a context-parallel rank has parts.

    Megatron's own rotary embedding asks the device for the lengths of the rows in every layer.
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
            query, key, value: [n, H, D], H being fewer for key and value, and D of the value maybe, too.
            attention_mask: not used; the rows say it all.
            packed_seq_params: a `PackedRows`; without angles if queries and keys are turned already.

        Returns:
            [n, H * D], D of the value.
        """
        assert isinstance(packed_seq_params, PackedRows)
        layout, rotary = packed_seq_params.layout, packed_seq_params.rotary
        assert layout is not None
        if rotary is not None:
            query, key = (rotate(x, *rotary, fused=self._fused) for x in (query, key))
        of_value = value.shape[-1]
        if of_value < query.shape[-1]:  # kernels want the same for all
            value = F.pad(value, (0, query.shape[-1] - of_value))
        if isinstance(layout, PartLayout):
            out = context_parallel_attention(query, key, value, layout, self._scale, self._group)
        elif query.is_cuda and query.dtype == torch.bfloat16:
            out = varlen_cuda(query, key, value, layout, self._scale, None)
        else:
            out = varlen_padded(query, key, value, layout, self._scale, None)
        return out[..., :of_value].flatten(1)
