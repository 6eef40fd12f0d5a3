"""Balanced partitions against all partitions of small cases."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dataproto import DataProto, balance, count_micro_batches, ragged

lengths_lists = st.lists(st.integers(0, 30), max_size=7)
partitions = st.sampled_from([balance.karmarkar_karp, balance.greedy_partition])


def largest(lengths: list[int], parts: list[list[int]]) -> int:
    return max(sum(lengths[row] for row in part) for part in parts)


def best(lengths: list[int], k: int, equal_size: bool) -> int:
    """The smallest possible largest total, by trying all assignments of rows to parts."""
    size = len(lengths) // k
    found = []
    for assignment in product(range(k), repeat=len(lengths)):
        if equal_size and any(assignment.count(part) != size for part in range(k)):
            continue
        totals = [0] * k
        for row, part in enumerate(assignment):
            totals[part] += lengths[row]
        found.append(max(totals))
    return min(found)


def batch_of(lengths: list[int]) -> DataProto:
    ids = ragged.ragged(torch.arange(sum(lengths)), lengths)
    tensors = {"input_ids": ids, "row": torch.arange(len(lengths))}
    return DataProto.from_dict(tensors, {"uid": [[i] for i in range(len(lengths))]}, {"step": [1]})


@given(lengths_lists, st.integers(1, 4), partitions)
def test_partitions_against_brute_force(lengths: list[int], k: int, partition) -> None:
    parts = partition(lengths, k)
    assert len(parts) == k
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    if partition is balance.karmarkar_karp:
        assert sum(1 for part in parts if part) == min(k, len(lengths))
    totals = [sum(lengths[row] for row in part) for part in parts]
    assert totals == sorted(totals, reverse=True)
    assert largest(lengths, parts) <= (4 / 3 - 1 / (3 * k)) * best(lengths, k, equal_size=False) + 1e-9
    assert partition(torch.tensor(lengths), k) == parts


@given(st.integers(1, 3), st.integers(0, 3), partitions, st.data())
def test_equal_size_partitions_against_brute_force(k: int, size: int, partition, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=k * size, max_size=k * size))
    parts = partition(lengths, k, equal_size=True)
    assert [len(part) for part in parts] == [size] * k
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert largest(lengths, parts) <= 2 * best(lengths, k, equal_size=True)


def test_partitions_of_small_examples_are_exact() -> None:
    assert balance.karmarkar_karp([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]  # 16 and 14: the textbook's result
    assert balance.karmarkar_karp([4, 4, 4, 4], 2, equal_size=True) == [[0, 3], [1, 2]]
    assert balance.greedy_partition([8, 7, 6, 5, 4], 2) == [[0, 3, 4], [1, 2]]
    assert balance.karmarkar_karp([5], 3) == [[0], [], []]
    assert balance.karmarkar_karp([], 2) == [[], []]


def test_partitions_of_many_rows_are_balanced() -> None:
    lengths = torch.randint(1, 8193, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    for equal_size in (False, True):
        parts = balance.karmarkar_karp(lengths, 64, equal_size)
        assert largest(lengths, parts) <= 1.001 * sum(lengths) / 64
    assert largest(lengths, balance.greedy_partition(lengths, 64)) <= 1.01 * sum(lengths) / 64


@given(lengths_lists, st.integers(1, 9))
def test_balance_rows_balances_the_chunks(lengths: list[int], n: int) -> None:
    order = balance.balance_rows(lengths, n)
    batch = batch_of(lengths)
    parts = batch.reorder(order).chunk(n, allow_unequal=True)
    assert sorted(row for part in parts for row in part["row"].tolist()) == list(range(len(lengths)))
    if len(lengths) % n == 0:
        totals = sorted(ragged.values(part["input_ids"]).shape[0] for part in parts)
        expected = balance.karmarkar_karp(lengths, n, equal_size=True)
        assert totals == sorted(sum(lengths[row] for row in part) for part in expected)
    # Rows of similar length go to different parts: each part takes one of every n, in order of length.
    ranked = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    for start in range(0, len(lengths), n):
        group = set(ranked[start : start + n])
        assert all(len(group & set(part["row"].tolist())) <= 1 for part in parts)


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abcd")), max_size=8), st.integers(1, 3))
def test_groups_stay_in_one_part(rows: list[tuple[int, str]], k: int) -> None:
    lengths, groups = [length for length, _ in rows], [name for _, name in rows]
    parts = balance.get_group_balanced_partitions(lengths, groups, k)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for name in set(groups):
        assert sum(any(groups[row] == name for row in part) for part in parts) == 1
    totals = [sum(length for length, group in rows if group == name) for name in dict.fromkeys(groups)]
    assert largest(lengths, parts) <= (4 / 3 - 1 / (3 * k)) * best(totals, k, equal_size=False) + 1e-9


@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_balance_rows_keeps_groups_in_one_chunk(n: int, groups_per_part: int, size: int, random) -> None:
    names = [name for name in range(n * groups_per_part) for _ in range(size)]
    random.shuffle(names)
    lengths = [random.randrange(30) for _ in names]
    order = balance.balance_rows(lengths, n, groups=names)
    chunks = DataProto.from_dict({"row": order}).chunk(n)
    assert sorted(order.tolist()) == list(range(len(names)))
    for chunk in chunks:
        here = [names[row] for row in chunk["row"].tolist()]
        assert here == [name for name in dict.fromkeys(here) for _ in range(size)]


def test_quadratic_workload_counts_matrices_and_attention() -> None:
    # One layer of 3 tokens at h = 4: 24 s h^2 for its matrices, 4 s^2 h for scores and values, in units of 4 h.
    assert balance.quadratic_workload([3, 0], 4).tolist() == [(24 * 3 * 16 + 4 * 9 * 4) // 16, 0]
    assert balance.quadratic_workload(torch.tensor([8192]), 8192).dtype == torch.int64


def test_rows_with_group_none_are_independent() -> None:
    lengths, names = [9, 9, 8, 8, 5, 4, 1, 1, 1, 1, 1, 1], [*"aabbcc", None, None, None, None, None, None]
    order = balance.balance_rows(lengths, 3, groups=names)  # padding of the size of three groups, not of one
    parts = [{names[row] for row in part} for part in order.reshape(3, 4).tolist()]
    assert sorted("".join(name or "-" for name in sorted(part, key=str)) for part in parts) == ["-a", "-b", "-c"]
    assert sorted(order.tolist()) == list(range(12))
    assert balance.balance_rows([3, 1, 2, 2], 2, groups=[None] * 4).reshape(2, 2).sort().values.tolist() == [
        [0, 1],
        [2, 3],
    ]
    with pytest.raises(ValueError, match=r"3 groups of \[1, 2\] rows"):
        balance.balance_rows([1] * 5, 1, ["a", "a", None, None, None])
    assert len(balance.get_group_balanced_partitions([1, 1, 1], [None, None, None], 3)[2]) == 1
    assert count_micro_batches([5] * 4, 10, groups=[None] * 4) == 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: balance.karmarkar_karp([1], 0), ValueError, "at least one part"),
        (lambda: balance.karmarkar_karp([1, -2], 1), ValueError, "got -2 for row 1"),
        (lambda: balance.karmarkar_karp([1.5], 1), TypeError, "integer"),
        (lambda: balance.karmarkar_karp([1, 2, 3], 2, equal_size=True), ValueError, "3 rows do not divide into 2"),
        (lambda: balance.balance_rows([1], 0), ValueError, "at least one part"),
        (lambda: balance.karmarkar_karp([True], 1), TypeError, "integer"),
        (lambda: balance.greedy_partition([1, 2, 3], 2, equal_size=True), ValueError, "3 rows do not divide into 2"),
        (lambda: balance.greedy_partition([1], 0), ValueError, "at least one part"),
        (lambda: balance.get_group_balanced_partitions([1], ["a", "b"], 1), ValueError, "one group name per row"),
        (lambda: balance.balance_rows([1, 2, 3], 1, ["a", "a", "b"]), ValueError, r"2 groups of \[1, 2\] rows"),
        (lambda: balance.balance_rows([1, 2, 3], 2, ["a", "b", "c"]), ValueError, "3 groups of .* into 2 parts"),
    ],
)
def test_invalid_arguments_of_balance_are_refused_with_a_message(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
