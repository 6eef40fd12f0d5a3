"""Balance: rows into parts of nearly equal total length, and micro-batches under a token cap."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import itemgetter
from typing import overload

import torch
from torch import Tensor

from tidemill_dataproto import ragged
from tidemill_dataproto.proto import DataProto

__all__ = [
    "balance_rows",
    "count_micro_batches",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
]

_Part = tuple[int, list[int]]  # total length, rows


def karmarkar_karp(lengths: Sequence[int] | Tensor, k: int, equal_size: bool = False) -> list[list[int]]:
    """Partitions the rows into `k` parts whose total lengths are nearly equal, by the largest differencing method.

    Source: N. Karmarkar, R. M. Karp, The differencing method of set partitioning (1982). Its largest part is at most
    4/3 - 1/(3k) times that of the best partition (W. Michiels et al., 2007).

    Args:
        lengths: one integer >= 0 per row (tokens, or any other measure of work).
        k: number of parts.
        equal_size: gives all parts the same number of rows.

    Returns:
        k lists of ascending row numbers, longest part first. No part is empty where there are k rows or more.

    Raises:
        TypeError: lengths that are not integers, one per row.
        ValueError: k < 1, a negative length, or equal_size with a number of rows that k does not divide.
    """
    rows = _checked_lengths(lengths)
    if k < 1:
        raise ValueError(f"expected at least one part, got {k}")
    if equal_size and len(rows) % k != 0:
        raise ValueError(f"{len(rows)} rows do not divide into {k} parts of equal size; pass equal_size=False")
    return _difference(rows, k, equal_size)


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int] | Tensor, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """`karmarkar_karp` by the name and keywords that users of verl know."""
    return karmarkar_karp(seqlen_list, k_partitions, equal_size)


def balance_rows(lengths: Sequence[int] | Tensor, n: int) -> Tensor:
    """A permutation, int64 `[B]`, after which `chunk(n)` gives parts of nearly equal total length.

    Where n does not divide B it is meant for `chunk(n, allow_unequal=True)`: the parts differ by one row at most, the
    larger ones come first. Apply it with `batch.reorder(order)`; `order.argsort()` is its inverse.
    """
    rows = _checked_lengths(lengths)
    if n < 1:
        raise ValueError(f"expected at least one part, got {n}")
    parts = _difference(rows, n, equal_size=True)
    parts.sort(key=len, reverse=True)
    return torch.tensor([row for part in parts for row in part], dtype=torch.int64)


def count_micro_batches(
    lengths: Sequence[int] | Tensor, max_token_len: int, min_num_micro_batch: int | None = None
) -> int:
    """How many micro-batches `rearrange_micro_batches` makes of rows of these lengths; at least one.

    Ranks agree on the largest of their counts before they call it, with that as num_micro_batches.

    Raises:
        ValueError: as `rearrange_micro_batches`.
    """
    return len(_pack(_checked_lengths(lengths, max_token_len), max_token_len, min_num_micro_batch))


def rearrange_micro_batches(
    batch: DataProto,
    max_token_len: int,
    *,
    length_key: str = "input_ids",
    num_micro_batches: int | None = None,
    min_num_micro_batch: int | None = None,
) -> tuple[list[DataProto], list[list[int]]]:
    """Cuts the batch into balanced micro-batches of at most `max_token_len` tokens each.

    Args:
        batch: any number of rows, also zero.
        max_token_len: the cap, never exceeded.
        length_key: a ragged column, whose row lengths count, or an integer column `[B]` of lengths.
        num_micro_batches: exactly as many micro-batches, so that all dp ranks have the same number; those that are left
            over have zero rows. As few as the cap allows where None.
        min_num_micro_batch: at least as many.

    Returns:
        The micro-batches, longest first, and the rows of `batch` in each, for `restore_dynamic_batch`.

    Raises:
        ValueError: a row is longer than the cap (named), num_micro_batches are too few, or length_key is of another
            kind.
        KeyError: no column length_key.
    """
    rows = _checked_lengths(_lengths_of(batch, length_key), max_token_len)
    parts = _pack(rows, max_token_len, min_num_micro_batch)
    if num_micro_batches is not None:
        if len(parts) > num_micro_batches:
            raise ValueError(
                f"{len(rows)} rows of {sum(rows)} tokens need {len(parts)} micro-batches of at most {max_token_len} "
                f"tokens, got num_micro_batches={num_micro_batches}; take the largest count of all ranks"
            )
        parts = _spread(rows, parts, max_token_len, num_micro_batches)
    return [batch.select_idxs(part) for part in parts], parts


@overload
def restore_dynamic_batch(data: Tensor, indices: Sequence[Sequence[int]]) -> Tensor: ...
@overload
def restore_dynamic_batch(data: DataProto | Sequence[DataProto], indices: Sequence[Sequence[int]]) -> DataProto: ...
def restore_dynamic_batch(
    data: DataProto | Tensor | Sequence[DataProto], indices: Sequence[Sequence[int]]
) -> DataProto | Tensor:
    """Brings results of micro-batches back to the order of the batch that `rearrange_micro_batches` cut.

    Args:
        data: one DataProto per micro-batch, or all of their rows, in the order of the micro-batches, as a DataProto or
            as a tensor, dense `[B, ...]` or ragged.
        indices: the second result of `rearrange_micro_batches`.

    Raises:
        ValueError: the indices are not those of the rows of data.
    """
    order = torch.tensor([row for part in indices for row in part], dtype=torch.int64)
    if not isinstance(data, DataProto | Tensor):
        data = DataProto.concat(data)
    num_rows = len(data) if isinstance(data, DataProto) else data.shape[0]
    if not torch.equal(order.sort().values, torch.arange(num_rows)):
        raise ValueError(f"expected the indices of {num_rows} rows, each once, got {order.shape[0]} indices")
    inverse = order.argsort()
    if isinstance(data, DataProto):
        return data.select_idxs(inverse)
    inverse = inverse.to(data.device)
    return ragged.index_rows(data, inverse) if data.is_nested else data.index_select(0, inverse)


def _lengths_of(batch: DataProto, length_key: str) -> Tensor:
    column = batch[length_key]
    if isinstance(column, Tensor) and ragged.is_ragged(column):
        return ragged.lengths(column)
    lengths = torch.as_tensor(column) if column.dtype != object else None
    if lengths is None or lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(
            f"expected length_key={length_key!r} to name a ragged column or an integer column [B] of lengths, got "
            f"{column.dtype} {list(column.shape)}; ragged.from_padded makes a padded column ragged"
        )
    return lengths


def _checked_lengths(lengths: Sequence[int] | Tensor, max_token_len: int | None = None) -> list[int]:
    rows = torch.as_tensor(lengths).tolist()
    if not all(isinstance(length, int) for length in rows):
        raise TypeError("expected integer lengths, one per row")
    if max_token_len is not None and max_token_len < 1:
        raise ValueError(f"expected max_token_len >= 1, got {max_token_len}")
    if rows and min(rows) < 0:
        raise ValueError(f"expected lengths >= 0, got {min(rows)} for row {rows.index(min(rows))}")
    if max_token_len is not None and rows and max(rows) > max_token_len:
        raise ValueError(
            f"row {rows.index(max(rows))} has {max(rows)} tokens, more than max_token_len={max_token_len}; "
            f"raise the cap or drop the row"
        )
    return rows


def _difference(lengths: list[int], k: int, equal_size: bool) -> list[list[int]]:
    """The largest differencing method on k-tuples of parts, sorted by falling total.

    Tuples hold their non-empty parts only, so that merging single rows, most of the work, does not cost k. With
    equal_size the first tuples hold k rows each, and all later ones equally many rows in each part; rows that are
    missing in the last, shortest tuple leave parts one row smaller.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    size = k if equal_size else 1
    heap: list[tuple[int, int, list[_Part]]] = []
    for start in range(0, len(order), size):
        parts = [(lengths[row], [row]) for row in order[start : start + size]]
        heap.append((-_spread_of(parts, k), start, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, largest = heapq.heappop(heap)
        _, _, second = heap[0]
        merged = _merge(largest, second, k)
        heapq.heapreplace(heap, (-_spread_of(merged, k), number, merged))
    parts = heap[0][2] if heap else []
    return [sorted(rows) for _, rows in parts] + [[] for _ in range(k - len(parts))]


def _spread_of(parts: list[_Part], k: int) -> int:
    return parts[0][0] - (parts[-1][0] if len(parts) == k else 0)


def _merge(a: list[_Part], b: list[_Part], k: int) -> list[_Part]:
    """Joins the largest part of `a` with the smallest of `b`, and so on; missing parts are empty and smallest."""
    apart = k - len(b)  # the parts of `a` that meet an empty part of `b`
    if apart >= len(a):
        merged = a + b
        if a[-1][0] >= b[0][0]:  # most merges: a tuple takes in one more row
            return merged
    else:
        merged = a[:apart]
        for (total_a, rows_a), (total_b, rows_b) in zip(a[apart:], reversed(b[k - len(a) :]), strict=True):
            merged.append((total_a + total_b, rows_a + rows_b))
        merged += b[: k - len(a)]
    merged.sort(key=itemgetter(0), reverse=True)
    return merged


def _pack(lengths: list[int], max_token_len: int, at_least: int | None) -> list[list[int]]:
    """As few parts under the cap as found, balanced: the differencing method at the lower bound of the number of parts,
    else at the number that best fit needs."""
    lower_bound = max(1, -(-sum(lengths) // max_token_len), 1 if at_least is None else at_least)
    parts = _difference(lengths, lower_bound, equal_size=False)
    if _fits(lengths, parts, max_token_len):
        return parts
    packed = _best_fit(lengths, max_token_len)
    return _spread(lengths, packed, max_token_len, max(lower_bound, len(packed)))


def _spread(lengths: list[int], parts: list[list[int]], max_token_len: int, count: int) -> list[list[int]]:
    """Exactly `count` parts under the cap, balanced where the differencing method keeps to it, else `parts`, split."""
    balanced = _difference(lengths, count, equal_size=False)
    if _fits(lengths, balanced, max_token_len):
        return balanced
    parts = sorted(parts, key=len)
    while len(parts) < count and parts and len(parts[-1]) > 1:
        part = parts.pop()
        halves = _difference([lengths[row] for row in part], 2, equal_size=False)
        for half in halves:
            insort(parts, [part[row] for row in half], key=len)
    parts.sort(key=lambda part: sum(lengths[row] for row in part), reverse=True)
    return parts + [[] for _ in range(count - len(parts))]


def _best_fit(lengths: list[int], max_token_len: int) -> list[list[int]]:
    """Best fit in order of falling length: each row goes where it leaves the least room."""
    rooms: list[tuple[int, int]] = []  # room left, part; ascending
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        at = bisect_left(rooms, (lengths[row], -1))
        if at < len(rooms):
            room, part = rooms.pop(at)
            parts[part].append(row)
        else:
            room, part = max_token_len, len(parts)
            parts.append([row])
        insort(rooms, (room - lengths[row], part))
    return [sorted(part) for part in parts]


def _fits(lengths: list[int], parts: list[list[int]], max_token_len: int) -> bool:
    return all(sum(lengths[row] for row in part) <= max_token_len for part in parts)
