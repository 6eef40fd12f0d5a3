"""Attention where each rank has two chunks of every row: of 2 S equal ones, rank r has the r-th from either end.

A causal row is more work the further back a token is, so the two chunks of each rank come to the same work. Keys and
values are gathered from all ranks; a chunk of queries then sees the keys from the begin of its row to its own end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartLayout:
    """Where the P chunks of queries of a rank lie, and the keys that each of them sees; built once per micro-batch.

    Attributes:
        keys: [K] int64, of each chunk in turn the keys that it sees, as indices in those gathered from rank after rank.
        cu_seqlens_q, cu_seqlens_k: [P + 1] int32, where the chunks begin and end among the n queries and in `keys`.
        max_q, max_k: of the longest chunk.
        padded_q, padded_k: [n] and [K] int64, where each lies in right-padded [P * max_q] and [P * max_k] layouts.
    """

    keys: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_q: int
    max_k: int
    padded_q: torch.Tensor
    padded_k: torch.Tensor

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], size: int, rank: int, device: torch.device) -> "PartLayout":
        """Of rows of `lengths` tokens, each a multiple of 2 * size, on one of `size` ranks."""
        starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).tolist()
        gathered = torch.empty(starts[-1], dtype=torch.int64)
        own = torch.cat([own_tokens(lengths, size, other) for other in range(size)])
        gathered[own] = torch.arange(starts[-1])
        lengths_q, lengths_k, keys = [], [], []
        for start, length in zip(starts[:-1], lengths, strict=True):
            chunk = length // (2 * size)
            for number in (rank, 2 * size - 1 - rank):
                lengths_q.append(chunk)
                lengths_k.append((number + 1) * chunk)
                keys.append(gathered[start : start + lengths_k[-1]])
        cu_q, padded_q = _places(lengths_q)
        cu_k, padded_k = _places(lengths_k)
        return cls(
            keys=torch.cat(keys).to(device, non_blocking=True),
            cu_seqlens_q=cu_q.to(device, non_blocking=True),
            cu_seqlens_k=cu_k.to(device, non_blocking=True),
            max_q=max(lengths_q),
            max_k=max(lengths_k),
            padded_q=padded_q.to(device, non_blocking=True),
            padded_k=padded_k.to(device, non_blocking=True),
        )


def own_tokens(lengths: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """Which of the tokens of packed rows a rank has, in the order in which it has them: int64 [sum(lengths) / size].

    Args:
        lengths: of the rows, multiples of 2 * size if size is above 1.
    """
    if size == 1:
        return torch.arange(sum(lengths))
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).tolist()
    parts = []
    for start, length in zip(starts[:-1], lengths, strict=True):
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(parts)


def context_parallel_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PartLayout, scale: float, group: dist.ProcessGroup
) -> torch.Tensor:
    """Causal attention within each row. Collective over `group`; gradients of keys and values are reduced over it.

    Args:
        q: [n, H, D], of this rank; k and v: [n, H_kv, D].

    Returns:
        [n, H, D].
    """
    gathered = gather_from_sequence_parallel_region(torch.cat([k, v], dim=1), group=group)
    k, v = gathered.index_select(0, layout.keys).chunk(2, dim=1)
    if q.is_cuda and q.dtype == torch.bfloat16:
        return _varlen(q, k, v, layout, scale)
    return _padded(q, k, v, layout, scale)


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PartLayout, scale: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(  # where a chunk has fewer queries than keys, its last query sees its last key
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        layout.cu_seqlens_q,
        layout.cu_seqlens_k,
        layout.max_q,
        layout.max_k,
        scale=scale,
        window_size=(-1, 0),
    )
    assert isinstance(out, torch.Tensor)
    return out


def _padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PartLayout, scale: float) -> torch.Tensor:
    """Through right-padded copies [P, H, L, D], for devices and dtypes without a kernel."""
    num_parts = len(layout.cu_seqlens_q) - 1

    def pad(x: torch.Tensor, index: torch.Tensor, length: int) -> torch.Tensor:
        padded = x.new_zeros(num_parts * length, *x.shape[1:]).index_copy(0, index, x)
        return padded.view(num_parts, length, *x.shape[1:]).transpose(1, 2)

    before = layout.cu_seqlens_k.diff() - layout.cu_seqlens_q.diff()  # keys before the first query of a chunk
    last_seen = before[:, None] + torch.arange(layout.max_q, device=q.device)
    out = F.scaled_dot_product_attention(
        pad(q, layout.padded_q, layout.max_q),
        pad(k, layout.padded_k, layout.max_k),
        pad(v, layout.padded_k, layout.max_k),
        attn_mask=(torch.arange(layout.max_k, device=q.device) <= last_seen[..., None]).unsqueeze(1),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, layout.padded_q)


def _places(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where parts begin and end (int32), and where their elements lie if each part is padded to the longest."""
    sizes = torch.tensor(lengths)
    ends = F.pad(sizes.cumsum(0), (1, 0))
    shift = torch.arange(len(sizes)) * int(sizes.max()) - ends[:-1]
    return ends.int(), torch.arange(int(ends[-1])) + shift.repeat_interleave(sizes)
