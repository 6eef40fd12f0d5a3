"""Modules that Megatron's layers are made of where its own need Transformer Engine."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from tidemill_engines.attention import varlen_cuda, varlen_padded
from tidemill_engines.megatron.packed import PackedRows, own_positions


class RMSNorm(torch.nn.RMSNorm):
    """As Megatron's, which refuses sequence parallelism: there each rank has the gradient of its tokens only, and
    Megatron adds those of weights that are marked so."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[assignment]


class PackedAttention(MegatronModule):
    """Causal attention within each of the packed rows.

    Where each rank has whole rows it is that of the other engines. With context parallelism each rank has the chunks
    `rank` and `2 * cp - 1 - rank` of the 2 cp chunks of each row, keys and values are gathered, and scores of all pairs
    of tokens are made: fit for a CPU.
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
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        self._group = pg_collection.cp
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
            query, key, value: [n, H, D], H being fewer for key and value.
            attention_mask: not used; the rows say it all.
            packed_seq_params: a `PackedRows`.

        Returns:
            [n, H * D].
        """
        assert isinstance(packed_seq_params, PackedRows)
        layout = packed_seq_params.layout
        if layout is None:
            return self._of_parts(query, key, value, packed_seq_params.cu_seqlens_q.diff().tolist())
        if query.is_cuda and query.dtype == torch.bfloat16:
            return varlen_cuda(query, key, value, layout, self._scale, None).flatten(1)
        return varlen_padded(query, key, value, layout, self._scale, None).flatten(1)

    def _of_parts(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]
    ) -> torch.Tensor:
        size, rank = self._group.size(), self._group.rank()
        key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=self._group) for x in (key, value))
        q_at = _positions(lengths, size, rank)
        kv_at = torch.cat([_positions(lengths, size, other) for other in range(size)], dim=1)
        visible = (q_at[0][:, None] == kv_at[0][None]) & (kv_at[1][None] <= q_at[1][:, None])
        out = F.scaled_dot_product_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)),
            attn_mask=visible.to(query.device),
            scale=self._scale,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)


def _positions(lengths: list[int], size: int, rank: int) -> torch.Tensor:
    """Number of the sequence and position in it of each token of a rank, [2, n]."""
    own = [own_positions(length, size, rank) for length in lengths]
    numbers = torch.repeat_interleave(torch.tensor([len(positions) for positions in own]))
    return torch.stack([numbers, torch.cat(own)])
