"""Partition rows into parts of nearly equal total length."""

import heapq
from collections.abc import Hashable, Sequence
from operator import itemgetter

import torch
from torch import Tensor

__all__ = [
    "balance_rows",
    "checked_lengths",
    "difference",
    "get_group_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "quadratic_workload",
    "rows_of_groups",
]

_Part = tuple[int, list[int]]  # total length, rows


def quadratic_workload(lengths: Sequence[int] | Tensor, hidden_size: int) -> Tensor:
    """Estimate the work of a dense transformer per row, int64 `[B]`: `length * (6 * hidden_size + length)`.

    The unit is 4 * hidden_size FLOPs per layer.

    Source: D. Narayanan et al., Efficient large-scale language model training on GPU clusters (2021), appendix: a
    layer takes 24 s h^2 + 4 s^2 h FLOPs forward for s tokens at hidden size h.
    """
    rows = torch.tensor(checked_lengths(lengths), dtype=torch.int64)
    return rows * (6 * hidden_size + rows)


def karmarkar_karp(lengths: Sequence[int] | Tensor, k: int, equal_size: bool = False) -> list[list[int]]:
    """Partition the rows into `k` parts of nearly equal total length, by the largest differencing method.

    Source: N. Karmarkar, R. M. Karp, The differencing method of set partitioning (1982). Its largest part is at most
    4/3 - 1/(3k) times that of the best partition (W. Michiels et al., 2007).

    Args:
        lengths: one integer >= 0 per row (tokens, or any other measure of work).
        k: number of parts.
        equal_size: whether all parts must have the same number of rows.

    Returns:
        k lists of ascending row numbers, longest part first. No part is empty if there are at least k rows.

    Raises:
        TypeError: lengths are not integers, one per row.
        ValueError: k < 1, a negative length, or equal_size with a number of rows that k does not divide.
    """
    rows = checked_lengths(lengths)
    _check_parts(len(rows), k, equal_size)
    return difference(rows, k, equal_size)


def greedy_partition(lengths: Sequence[int] | Tensor, k: int, equal_size: bool = False) -> list[list[int]]:
    """Partition as `karmarkar_karp`, by assigning the longest remaining row to the part with the smallest total.

    Source: R. L. Graham, Bounds on multiprocessing timing anomalies (1969): the same bound, usually less balanced.
    """
    rows = checked_lengths(lengths)
    _check_parts(len(rows), k, equal_size)
    room = len(rows) // k if equal_size else len(rows)
    parts: list[list[int]] = [[] for _ in range(k)]
    totals = [(0, part) for part in range(k)]  # heap of the parts that are not full
    for row in _descending(rows):
        total, part = totals[0]
        parts[part].append(row)
        if len(parts[part]) < room:
            heapq.heapreplace(totals, (total + rows[row], part))
        else:
            heapq.heappop(totals)
    return sorted(map(sorted, parts), key=lambda part: -sum(rows[row] for row in part))


def get_group_balanced_partitions(
    seqlen_list: Sequence[int] | Tensor, uid_list: Sequence[Hashable], k_partitions: int
) -> list[list[int]]:
    """Partition as `karmarkar_karp`, with all rows of one uid in one part.

    Args:
        seqlen_list: one integer >= 0 per row.
        uid_list: one group name per row; rows with the name None, such as padding, are independent.
        k_partitions: number of parts.
    """
    rows = checked_lengths(seqlen_list)
    groups = rows_of_groups(uid_list, len(rows))
    parts = karmarkar_karp([sum(rows[row] for row in group) for group in groups], k_partitions)
    return [sorted(row for group in part for row in groups[group]) for part in parts]


def balance_rows(lengths: Sequence[int] | Tensor, n: int, groups: Sequence[Hashable] | None = None) -> Tensor:
    """Return a permutation, int64 `[B]`, after which `chunk(n)` gives parts of nearly equal total length.

    Apply it with `batch.reorder(order)`; `order.argsort()` is its inverse. If n does not divide B, it is for
    `chunk(n, allow_unequal=True)`: the parts differ by at most one row, larger ones first.

    Args:
        lengths: one integer >= 0 per row.
        n: number of parts.
        groups: one group name per row: rows of one group are in one part, next to each other. Rows with the name None,
            such as padding, are independent; as many of them as a group has rows can take the place of a group.

    Raises:
        ValueError: n < 1, groups of different sizes, or a number of groups that n does not divide: equal chunks cannot
            keep them together.
    """
    rows = checked_lengths(lengths)
    if n < 1:
        raise ValueError(f"expected at least one part, got n={n}")
    if groups is None:
        parts = difference(rows, n, equal_size=True)
        parts.sort(key=len, reverse=True)
        return torch.tensor([row for part in parts for row in part], dtype=torch.int64)
    units = [unit for unit in rows_of_groups(groups, len(rows)) if groups[unit[0]] is not None]
    size = max(map(len, units), default=1)
    alone = [row for row, name in enumerate(groups) if name is None]
    units += [alone[start : start + size] for start in range(0, len(alone), size)]
    sizes = sorted({len(unit) for unit in units})
    if len(sizes) > 1 or len(units) % n != 0:
        raise ValueError(
            f"{len(units)} groups of {sizes} rows do not divide into {n} parts with the same number of rows; use "
            f"get_group_balanced_partitions() and select_idxs() for each part"
        )
    parts = difference([sum(rows[row] for row in unit) for unit in units], n, equal_size=True)
    return torch.tensor([row for part in parts for unit in part for row in units[unit]], dtype=torch.int64)


def rows_of_groups(groups: Sequence[Hashable], num_rows: int) -> list[list[int]]:
    """Return the rows of each group, in order of first appearance; a row with the name None is alone."""
    if len(groups) != num_rows:
        raise ValueError(f"expected one group name per row, {num_rows}, got {len(groups)} names")
    rows: dict[tuple[Hashable, int], list[int]] = {}
    for row, name in enumerate(groups):
        if not isinstance(name, Hashable):
            raise TypeError(
                f"expected group names such as strings or numbers, got {type(name).__name__} for row {row}; convert it"
            )
        rows.setdefault((name, row if name is None else -1), []).append(row)
    return list(rows.values())


def checked_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """Return lengths as a list. TypeError unless integers, one per row; ValueError for a negative one."""
    given = torch.as_tensor(lengths)
    rows = given.tolist()
    if not all(isinstance(length, int) and not isinstance(length, bool) for length in rows):
        kind = str(given.dtype).removeprefix("torch.")
        raise TypeError(f"expected integer lengths, one per row, got {kind} {list(given.shape)}; round or sum them")
    if rows and min(rows) < 0:
        raise ValueError(
            f"expected lengths >= 0, got {min(rows)} for row {rows.index(min(rows))}; check the length column"
        )
    return rows


def _check_parts(num_rows: int, k: int, equal_size: bool) -> None:
    if k < 1:
        raise ValueError(f"expected at least one part, got k={k}")
    if equal_size and num_rows % k != 0:
        raise ValueError(f"{num_rows} rows do not divide into {k} parts of equal size; pass equal_size=False")


def _descending(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def difference(lengths: list[int], k: int, equal_size: bool) -> list[list[int]]:
    """Run the largest differencing method on k-tuples of parts, sorted by descending total.

    Tuples store their non-empty parts only, so that merging single rows, most of the work, does not cost O(k). With
    equal_size the first tuples hold k rows each, and all later ones the same number of rows in each part; if the last
    tuple has fewer rows, some parts are one row smaller.
    """
    order = _descending(lengths)
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
    """Merge the largest part of `a` with the smallest of `b`, and so on; missing parts count as empty."""
    apart = k - len(b)  # number of parts of `a` merged with an empty part of `b`
    if apart >= len(a):
        merged = a + b
        if a[-1][0] >= b[0][0]:  # the common case: a tuple and a single row
            return merged
    else:
        merged = a[:apart]
        for (total_a, rows_a), (total_b, rows_b) in zip(a[apart:], reversed(b[k - len(a) :]), strict=True):
            merged.append((total_a + total_b, rows_a + rows_b))
        merged += b[: k - len(a)]
    merged.sort(key=itemgetter(0), reverse=True)
    return merged
