"""Micro-batches under a token cap, the same number on every rank, and restoring the order of rows."""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill_dataproto import ragged
from tidemill_dataproto.balance import checked_lengths, difference, rows_of_groups
from tidemill_dataproto.gather import agree
from tidemill_dataproto.proto import DataProto

__all__ = ["count_micro_batches", "prepare_dynamic_batch", "rearrange_micro_batches", "restore_dynamic_batch"]

Workload = Callable[[Tensor], Tensor]
"""Function from row lengths, int64 `[B]`, to the work of each row, integers >= 0 `[B]`; see `quadratic_workload`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Units:
    """Units that are never split between micro-batches: rows, or groups of rows.

    Attributes:
        rows: rows of each unit.
        tokens: number of tokens of each unit; the total of a micro-batch stays under the cap.
        work: work of each unit; the totals of the micro-batches are balanced.
    """

    rows: list[list[int]]
    tokens: list[int]
    work: list[int]


def count_micro_batches(
    lengths: Sequence[int] | Tensor,
    max_token_len: int,
    min_num_micro_batch: int | None = None,
    groups: Sequence[Hashable] | None = None,
) -> int:
    """Return the number of micro-batches that `rearrange_micro_batches` makes for these lengths; at least one.

    For the same number on every rank, all-reduce the maximum and pass it as num_micro_batches, or call
    `prepare_dynamic_batch`, which does both.

    Raises:
        ValueError: as `rearrange_micro_batches`.
    """
    units = _units(checked_lengths(lengths), max_token_len, groups, None)
    return len(_pack(units, max_token_len, min_num_micro_batch))


def rearrange_micro_batches(
    batch: DataProto,
    max_token_len: int,
    *,
    num_micro_batches: int | None = None,
    min_num_micro_batch: int | None = None,
    num_batches_divided_by: int | None = None,
    length_key: str = "input_ids",
    group_key: str | None = None,
    workload: Workload | None = None,
) -> tuple[list[DataProto], list[list[int]]]:
    """Split the batch into balanced micro-batches of at most `max_token_len` tokens each.

    Args:
        batch: any number of rows, including zero.
        max_token_len: the cap, never exceeded.
        num_micro_batches: exact number of micro-batches, some may be empty; as few as the cap allows if None.
        min_num_micro_batch: minimum number.
        num_batches_divided_by: divisor of the number, which is rounded up (for interleaved pipelines).
        length_key: a ragged column, for its row lengths, or an integer column `[B]` of lengths.
        group_key: a column of group names; rows of one group are in one micro-batch. Padding rows and rows with the
            name None are independent.
        workload: function from row lengths to the work to balance; the lengths themselves if None.

    Returns:
        The micro-batches, views of one copy of the rows, those with the most work first, and the rows of `batch` in
        each, for `restore_dynamic_batch`.

    Raises:
        ValueError: a row or group exceeds the cap (the error names it), num_micro_batches is too low, or the column
            length_key is of another kind.
        KeyError: an unknown column.
    """
    units = _units_of(batch, max_token_len, length_key, group_key, workload)
    parts = _pack(units, max_token_len, min_num_micro_batch)
    count = len(parts) if num_micro_batches is None else num_micro_batches
    if len(parts) > count:
        raise ValueError(
            f"{len(batch)} rows of {sum(units.tokens)} tokens need {len(parts)} micro-batches of at most "
            f"{max_token_len} tokens, got num_micro_batches={count}; pass the largest count of all ranks"
        )
    return _arranged(batch, units, parts, max_token_len, _multiple(count, num_batches_divided_by))


def prepare_dynamic_batch(
    data: DataProto,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    min_num_micro_batch: int | None = None,
    *,
    length_key: str = "input_ids",
    group_key: str | None = None,
    workload: Workload | None = None,
) -> tuple[list[DataProto], list[list[int]]]:
    """`rearrange_micro_batches` with the same number of micro-batches on every rank of `dp_group`; some may be empty.

    Collective over `dp_group`, if given: the ranks exchange their counts once. Arguments and results are those of
    `rearrange_micro_batches`.

    Raises:
        ValueError: the rows of one rank do not fit; raised on all ranks, and names that rank.
        KeyError: an unknown column (without a group).
    """
    error = None
    units, parts, count = _Units(rows=[], tokens=[], work=[]), [], 0
    try:
        units = _units_of(data, max_token_len, length_key, group_key, workload)
        parts = _pack(units, max_token_len, min_num_micro_batch)
        count = _multiple(len(parts), num_batches_divided_by)
    except Exception as caught:  # any, because `workload` is user code, and the other ranks would wait for this rank
        if dp_group is None:
            raise
        error = caught
    if dp_group is not None:
        count = max(agree(count, error, dp_group))
    return _arranged(data, units, parts, max_token_len, count)


@overload
def restore_dynamic_batch(data: Tensor, indices: Sequence[Sequence[int]]) -> Tensor: ...
@overload
def restore_dynamic_batch(data: DataProto | Sequence[DataProto], indices: Sequence[Sequence[int]]) -> DataProto: ...
def restore_dynamic_batch(
    data: DataProto | Tensor | Sequence[DataProto], indices: Sequence[Sequence[int]]
) -> DataProto | Tensor:
    """Restore the row order of the batch that `rearrange_micro_batches` split.

    Args:
        data: one DataProto per micro-batch, or all of their rows, in the order of the micro-batches, as a DataProto or
            as a tensor, dense `[B, ...]` or ragged. Padding rows are kept.
        indices: the second result of `rearrange_micro_batches`.

    Raises:
        ValueError: the indices do not match the rows of data.
    """
    order = torch.tensor([row for part in indices for row in part], dtype=torch.int64)
    if not isinstance(data, DataProto | Tensor):
        data = DataProto._join(data, {}, None)
    num_rows = len(data) if isinstance(data, DataProto) else data.shape[0]
    if not torch.equal(order.sort().values, torch.arange(num_rows)):
        raise ValueError(
            f"expected indices with each of {num_rows} rows once, got {order.shape[0]} indices; pass those of the "
            f"same call"
        )
    inverse = order.argsort()
    if isinstance(data, DataProto):
        return data.select_idxs(inverse)
    return ragged.index_rows(data, inverse) if data.is_nested else data.index_select(0, inverse.to(data.device))


def _arranged(
    batch: DataProto, units: _Units, parts: list[list[int]], max_token_len: int, count: int
) -> tuple[list[DataProto], list[list[int]]]:
    """Return the rows of `count` parts as batches, and their row numbers; splits parts if there are fewer."""
    if len(parts) < count:
        parts = _spread(units, parts, max_token_len, count)
    indices = [sorted(row for unit in part for row in units.rows[unit]) for part in parts]
    bounds = list(accumulate(map(len, indices), initial=0))
    return batch.select_idxs([row for rows in indices for row in rows])._cut(bounds), indices


def _units_of(
    batch: DataProto, max_token_len: int, length_key: str, group_key: str | None, workload: Workload | None
) -> _Units:
    column = batch[length_key]
    if isinstance(column, Tensor) and ragged.is_ragged(column):
        lengths = ragged.host_lengths(column)
    else:
        lengths = torch.as_tensor(column) if column.dtype != object else None
        if lengths is None or lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise ValueError(
                f"expected length_key={length_key!r} to name a ragged column or an integer column [B] of lengths, got "
                f"{column.dtype} {list(column.shape)}; convert a padded column with ragged.from_padded()"
            )
    groups = None
    if group_key is not None:
        names = zip(batch[group_key].tolist(), batch.is_padding, strict=True)
        groups = [None if is_padding else name for name, is_padding in names]
    return _units(checked_lengths(lengths), max_token_len, groups, workload)


def _units(
    lengths: list[int], max_token_len: int, groups: Sequence[Hashable] | None, workload: Workload | None
) -> _Units:
    if not isinstance(max_token_len, int) or max_token_len < 1:
        raise ValueError(f"expected max_token_len as an integer >= 1, got {max_token_len!r}")
    rows = [[row] for row in range(len(lengths))] if groups is None else rows_of_groups(groups, len(lengths))
    tokens = [sum(lengths[row] for row in unit) for unit in rows]
    longest = max(range(len(tokens)), key=tokens.__getitem__, default=None)
    if longest is not None and tokens[longest] > max_token_len:
        first = rows[longest][0]
        name = None if groups is None else groups[first]
        what = f"row {first}" if name is None else f"the group {name!r}"
        raise ValueError(
            f"{what} has {tokens[longest]} tokens, more than max_token_len={max_token_len}; raise the cap, or drop or "
            f"truncate it"
        )
    if workload is None:
        return _Units(rows=rows, tokens=tokens, work=tokens)
    per_row = checked_lengths(workload(torch.tensor(lengths, dtype=torch.int64)))
    if len(per_row) != len(lengths):
        raise ValueError(f"expected workload to return one number for each of {len(lengths)} rows, got {len(per_row)}")
    return _Units(rows=rows, tokens=tokens, work=[sum(per_row[row] for row in unit) for unit in rows])


def _multiple(count: int, of: int | None) -> int:
    if of is None:
        return count
    if of < 1:
        raise ValueError(f"expected num_batches_divided_by >= 1, got {of}")
    return -(-count // of) * of


def _pack(units: _Units, max_token_len: int, at_least: int | None) -> list[list[int]]:
    """Return as few balanced parts under the cap as found.

    The number is the lower bound if the differencing method stays under the cap there, else that of best fit.
    """
    lower_bound = max(1, -(-sum(units.tokens) // max_token_len), 1 if at_least is None else at_least)
    parts = _balanced(units, max_token_len, lower_bound)
    if parts is not None:
        return parts
    packed = _best_fit(units.tokens, max_token_len)
    return _spread(units, packed, max_token_len, max(lower_bound, len(packed)))


def _spread(units: _Units, parts: list[list[int]], max_token_len: int, count: int) -> list[list[int]]:
    """Return `count` parts under the cap: balanced by the differencing method if possible, else `parts`, split."""
    balanced = _balanced(units, max_token_len, count)
    if balanced is not None:
        return balanced
    parts = sorted(parts, key=len)
    while len(parts) < count and parts and len(parts[-1]) > 1:
        part = parts.pop()
        for half in difference([units.work[unit] for unit in part], 2, equal_size=False):
            insort(parts, [part[at] for at in half], key=len)
    parts.sort(key=lambda part: sum(units.work[unit] for unit in part), reverse=True)
    return parts + [[] for _ in range(count - len(parts))]


def _balanced(units: _Units, max_token_len: int, count: int) -> list[list[int]] | None:
    """Return `count` parts of balanced work, or at least balanced tokens, if they are under the cap, else None."""
    for measure in [units.work] if units.work is units.tokens else [units.work, units.tokens]:
        parts = difference(measure, count, equal_size=False)
        if all(sum(units.tokens[unit] for unit in part) <= max_token_len for part in parts):
            return sorted(parts, key=lambda part: -sum(units.work[unit] for unit in part))
    return None


def _best_fit(tokens: list[int], max_token_len: int) -> list[list[int]]:
    """Run best fit in descending order of length: each unit goes where it leaves the least room."""
    rooms: list[tuple[int, int]] = []  # room left, part; ascending
    parts: list[list[int]] = []
    for unit in sorted(range(len(tokens)), key=lambda unit: -tokens[unit]):
        at = bisect_left(rooms, (tokens[unit], -1))
        if at < len(rooms):
            room, part = rooms.pop(at)
            parts[part].append(unit)
        else:
            room, part = max_token_len, len(parts)
            parts.append([unit])
        insort(rooms, (room - tokens[unit], part))
    return [sorted(part) for part in parts]
