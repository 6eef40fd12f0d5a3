"""Row arithmetic: how many rows each shard has, and which parts of a result hold them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


def balanced_lengths(num_rows: int, n: int) -> list[int]:
    """Return the number of rows of each of n shards. They differ by at most one, the longer ones first."""
    share, extra = divmod(num_rows, n)
    return [share + (index < extra) for index in range(n)]


def shard_bounds(num_rows: int, n: int, index: int) -> tuple[int, int]:
    """Return the first row of shard `index` of n, and the row after its last."""
    share, extra = divmod(num_rows, n)
    start = index * share + min(index, extra)
    return start, start + share + (index < extra)


@dataclass(frozen=True, slots=True)
class PartSlice:
    """Rows `start` to `stop` of part number `part`."""

    part: int
    start: int
    stop: int


def part_slices(lengths: Sequence[int], start: int, stop: int) -> tuple[PartSlice, ...]:
    """Return the slices that hold rows `start` to `stop` of the concatenation of parts with these lengths, in order.

    An empty range is an empty slice of one part, because an empty batch has columns too.

    Raises:
        ValueError: the rows are out of range.
    """
    if not 0 <= start <= stop <= sum(lengths):
        raise ValueError(f"expected rows within 0 to {sum(lengths)}, got {start} to {stop}")
    ends = list(accumulate(lengths))
    if start == stop:
        part = next((i for i, end in enumerate(ends) if start < end), len(ends) - 1)
        at = start - ends[part] + lengths[part]
        return (PartSlice(part, at, at),)
    found = []
    for part, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        first, last = max(start, end - length), min(stop, end)
        if first < last:
            found.append(PartSlice(part, first - end + length, last - end + length))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Rows of one shard of a result.

    Attributes:
        slices: rows to take from the parts. A shard that is all padding takes one row to make padding from.
        num_real: number of rows without padding.
        num_rows: number of rows with padding.
    """

    slices: tuple[PartSlice, ...]
    num_real: int
    num_rows: int


def plan_shard(lengths: Sequence[int], n: int, index: int, *, padded: bool) -> ShardPlan:
    """Plan shard `index` of n of a result in parts of these lengths.

    With `padded`, all n shards have the same number of rows: that of the longest.
    """
    total = sum(lengths)
    start, stop = shard_bounds(total, n, index)
    num_rows = -(-total // n) if padded else stop - start
    if num_rows > 0 and start == stop:
        return ShardPlan(part_slices(lengths, total - 1, total), 0, num_rows)
    return ShardPlan(part_slices(lengths, start, stop), stop - start, num_rows)
