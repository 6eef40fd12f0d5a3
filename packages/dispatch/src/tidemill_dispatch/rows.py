"""Arithmetic of rows: how many each shard gets, and which parts of a result hold them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


def balanced_lengths(num_rows: int, n: int) -> list[int]:
    """Rows of each of n shards: they differ by at most one, the longer ones first."""
    share, extra = divmod(num_rows, n)
    return [share + (index < extra) for index in range(n)]


def bounds(num_rows: int, n: int, index: int) -> tuple[int, int]:
    """First row of shard `index` of n, and the row after its last."""
    share, extra = divmod(num_rows, n)
    start = index * share + min(index, extra)
    return start, start + share + (index < extra)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows `start` to `stop` of a part."""

    part: int
    start: int
    stop: int


def cuts(lengths: Sequence[int], start: int, stop: int) -> tuple[Cut, ...]:
    """Where rows `start` to `stop` of the concatenation of parts with these lengths are, in order.

    No rows at all are an empty cut of one part, because an empty batch, too, has columns.

    Raises:
        ValueError: the rows are not there.
    """
    if not 0 <= start <= stop <= sum(lengths):
        raise ValueError(f"rows {start} to {stop} are not among the {sum(lengths)} rows of parts of {list(lengths)}")
    ends = list(accumulate(lengths))
    if start == stop:
        part = next((i for i, end in enumerate(ends) if start < end), len(ends) - 1)
        at = start - ends[part] + lengths[part]
        return (Cut(part, at, at),)
    found = []
    for part, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        first, last = max(start, end - length), min(stop, end)
        if first < last:
            found.append(Cut(part, first - end + length, last - end + length))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What one shard of a result is made of.

    Attributes:
        cuts: the rows to take. If the shard is to be padded but has no row of its own, one row to make padding from.
        num_real: rows of the shard that are the batch's own.
        num_rows: rows of the shard with its padding.
    """

    cuts: tuple[Cut, ...]
    num_real: int
    num_rows: int


def plan_shard(lengths: Sequence[int], n: int, index: int, *, padded: bool) -> ShardPlan:
    """Plans shard `index` of n of a result that came in parts of these lengths.

    With `padded` all n shards have the same number of rows, the smallest that holds the longest of them.
    """
    total = sum(lengths)
    start, stop = bounds(total, n, index)
    num_rows = -(-total // n) if padded else stop - start
    if num_rows > 0 and start == stop:
        return ShardPlan(cuts(lengths, total - 1, total), 0, num_rows)
    return ShardPlan(cuts(lengths, start, stop), stop - start, num_rows)
