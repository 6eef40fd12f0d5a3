"""Context-parallel attention: a row is cut into 2 S equal chunks, and rank r of S has the r-th and the r-th from last.

Later tokens of a causal row attend to more keys, so this gives every rank the same work. Keys and values are gathered
from all ranks; a chunk of queries attends to the keys from the start of its row to its own end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from tidemill_engines.distributed.device import to_device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartLayout:
    """Positions of the P chunks of queries of a rank, and of the keys of each. Built once per micro-batch.

    Attributes:
        keys: [K] int64, the keys of each chunk, chunk by chunk, as indices in the keys gathered in rank order.
        cu_seqlens_q, cu_seqlens_k: [P + 1] int32, boundaries of the chunks among the n queries and in `keys`.
        max_q, max_k: queries and keys of the longest chunk.
        padded_q, padded_k: [n] and [K] int64, indices in right-padded [P * max_q] and [P * max_k] layouts.
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
        """Layout of rows of `lengths` tokens, each a multiple of 2 * size, on one of `size` ranks."""
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
        cu_q, padded_q = _bounds_and_padded_indices(lengths_q)
        cu_k, padded_k = _bounds_and_padded_indices(lengths_k)
        return cls(
            keys=to_device(torch.cat(keys), device),
            cu_seqlens_q=to_device(cu_q, device),
            cu_seqlens_k=to_device(cu_k, device),
            max_q=max(lengths_q),
            max_k=max(lengths_k),
            padded_q=to_device(padded_q, device),
            padded_k=to_device(padded_k, device),
        )


def own_tokens(lengths: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """Indices of the tokens of packed rows that a rank has, in its order: int64 [sum(lengths) / size].

    Args:
        lengths: lengths of the rows, multiples of 2 * size if size is above 1.
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
    """Compute causal attention within each row. Collective over `group`, also in the backward.

    Args:
        q: [n, H, D], queries of this rank.
        k, v: [n, H_kv, D], keys and values of this rank.

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

    out = varlen_attn(  # if a chunk has fewer queries than keys, its last query attends to its last key
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
    """Attention on right-padded copies [P, H, L, D], for devices and dtypes without a varlen kernel."""
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


def _bounds_and_padded_indices(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Boundaries of parts (int32), and the indices of their elements if each part is padded to the longest."""
    sizes = torch.tensor(lengths)
    ends = F.pad(sizes.cumsum(0), (1, 0))
    shift = torch.arange(len(sizes)) * int(sizes.max()) - ends[:-1]
    return ends.int(), torch.arange(int(ends[-1])) + shift.repeat_interleave(sizes)
