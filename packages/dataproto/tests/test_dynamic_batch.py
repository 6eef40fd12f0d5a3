"""Micro-batches under their cap, and the way back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dataproto import (
    DataProto,
    count_micro_batches,
    prepare_dynamic_batch,
    ragged,
    rearrange_micro_batches,
    restore_dynamic_batch,
)

lengths_lists = st.lists(st.integers(0, 30), max_size=7)


def largest(lengths: list[int], parts: list[list[int]]) -> int:
    return max(sum(lengths[row] for row in part) for part in parts)


def batch_of(lengths: list[int]) -> DataProto:
    ids = ragged.ragged(torch.arange(sum(lengths)), lengths)
    tensors = {"input_ids": ids, "row": torch.arange(len(lengths))}
    return DataProto.from_dict(tensors, {"uid": [[i] for i in range(len(lengths))]}, {"step": [1]})


@given(lengths_lists, st.integers(30, 70), st.integers(0, 3), st.none() | st.integers(1, 9))
def test_micro_batches_stay_under_the_cap_and_restore_the_rows(
    lengths: list[int], cap: int, more: int, at_least: int | None
) -> None:
    batch = batch_of(lengths)
    count = count_micro_batches(lengths, cap, at_least)
    parts, indices = rearrange_micro_batches(batch, cap, min_num_micro_batch=at_least)
    assert len(parts) == len(indices) == count >= (1 if at_least is None else at_least)
    for wanted in (None, count, count + more):
        parts, indices = rearrange_micro_batches(batch, cap, num_micro_batches=wanted, min_num_micro_batch=at_least)
        assert len(parts) == (count if wanted is None else wanted)
        for part, rows in zip(parts, indices, strict=True):
            assert part["row"].tolist() == rows
            assert ragged.values(part["input_ids"]).shape[0] <= cap
            assert part.meta_info == {"step": [1]}
            assert part.meta_info["step"] is not batch.meta_info["step"]
        back = restore_dynamic_batch(parts, indices)
        assert isinstance(back, DataProto)
        assert back["row"].tolist() == list(range(len(lengths)))
        assert back["uid"].tolist() == [[i] for i in range(len(lengths))]
        assert ragged.values(back["input_ids"]).tolist() == list(range(sum(lengths)))
        whole = DataProto.concat(parts)
        for data in (whole["row"], whole["input_ids"]):
            restored = restore_dynamic_batch(data, indices)
            assert isinstance(restored, torch.Tensor)
            flat = ragged.values(restored) if restored.is_nested else restored
            assert flat.tolist() == list(range(len(flat)))


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 40), st.integers(0, 5))
def test_larger_num_micro_batches_always_fits(lengths: list[int], cap: int, more: int) -> None:
    count = count_micro_batches(lengths, cap)
    assert count <= 2 * max(1, -(-sum(lengths) // cap))  # two parts that cannot be merged exceed the cap together
    _, indices = rearrange_micro_batches(batch_of(lengths), cap, num_micro_batches=count + more)
    assert len(indices) == count + more
    assert largest(lengths, indices) <= cap


def test_best_fit_is_used_if_differencing_exceeds_the_cap() -> None:
    lengths = [5, 5, 4, 4, 3, 3, 3, 3]  # two parts of 15 exist; differencing may miss them, never the cap
    for cap in range(5, 31):
        _, indices = rearrange_micro_batches(batch_of(lengths), cap)
        assert largest(lengths, indices) <= cap
    pairs = [6] * 8  # a sum of lengths would allow 5 micro-batches, but only single rows fit
    assert count_micro_batches(pairs, 10) == 8


def test_best_fit_packing_is_kept_if_differencing_exceeds_the_cap_at_its_number_too() -> None:
    lengths = [5, 19, 17, 7, 9, 10, 6]
    micro_batches, indices = rearrange_micro_batches(batch_of(lengths), 19)
    assert [sum(lengths[row] for row in rows) for rows in indices] == [19, 19, 18, 17]
    assert len(micro_batches) == 4


def test_length_key_may_be_an_integer_column() -> None:
    batch = batch_of([3, 1, 2])
    batch.batch["cost"] = torch.tensor([9, 1, 4])
    _, indices = rearrange_micro_batches(batch, 10, length_key="cost")
    assert indices == [[0], [1, 2]]


@given(lengths_lists, st.integers(30, 70), st.integers(1, 4), st.none() | st.integers(1, 5))
def test_number_of_micro_batches_is_a_multiple_of_the_divisor(
    lengths: list[int], cap: int, of: int, at_least: int | None
) -> None:
    batch = batch_of(lengths)
    needed = count_micro_batches(lengths, cap, at_least)
    for make in (rearrange_micro_batches, prepare_dynamic_batch):
        parts, indices = make(batch, cap, num_batches_divided_by=of, min_num_micro_batch=at_least)
        assert len(parts) % of == 0
        assert 0 <= len(parts) - needed < of
        assert largest(lengths, indices) <= cap
        assert restore_dynamic_batch(parts, indices) == batch


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcd")), max_size=9), st.integers(0, 3))
def test_groups_stay_in_one_micro_batch(rows: list[tuple[int, str]], more: int) -> None:
    lengths, groups = [length for length, _ in rows], [name for _, name in rows]
    totals = [sum(length for length, group in rows if group == name) for name in set(groups)]
    cap = max([*totals, 1])
    batch = batch_of(lengths)
    batch.non_tensor_batch["group"] = DataProto.from_dict({}, {"group": groups})["group"]
    count = count_micro_batches(lengths, cap, groups=groups)
    for wanted in (None, count + more):
        parts, indices = rearrange_micro_batches(batch, cap, group_key="group", num_micro_batches=wanted)
        assert len(parts) == (count if wanted is None else wanted)
        assert largest(lengths, indices) <= cap
        for name in set(groups):
            assert sum(name in part["group"].tolist() for part in parts) == 1
        assert restore_dynamic_batch(parts, indices) == batch


def test_workload_is_balanced_under_the_token_cap() -> None:
    lengths = [1000, *[100] * 10, *[50] * 20]
    _, by_tokens = rearrange_micro_batches(batch_of(lengths), 1600, num_micro_batches=2)
    _, by_work = rearrange_micro_batches(
        batch_of(lengths), 2500, num_micro_batches=2, workload=lambda rows: rows * rows
    )
    squares = [length * length for length in lengths]
    assert largest(lengths, by_tokens) <= 1550
    assert by_work[0] == [0]  # alone: its square outweighs all others
    assert largest(squares, by_work) < largest(squares, by_tokens)
    _, capped = rearrange_micro_batches(batch_of(lengths), 1600, num_micro_batches=2, workload=lambda rows: rows * rows)
    assert largest(lengths, capped) <= 1600  # the cap has priority


def test_micro_batches_are_in_descending_order_of_work() -> None:
    lengths = [9, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    _, indices = rearrange_micro_batches(batch_of(lengths), 10, workload=lambda rows: 10 - rows)
    work = [sum(10 - lengths[row] for row in part) for part in indices]
    assert work == sorted(work, reverse=True)


BATCH = batch_of([3, 9, 2])
GROUPED = DataProto.from_dict({"input_ids": BATCH["input_ids"]}, {"g": ["a", "a", "b"]})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: count_micro_batches([1], 0), ValueError, "max_token_len as an integer >= 1, got 0"),
        (lambda: count_micro_batches([1], 4.5), ValueError, "max_token_len as an integer >= 1, got 4.5"),
        (lambda: count_micro_batches([1, 7], 6), ValueError, "row 1 has 7 tokens, more than max_token_len=6"),
        (lambda: rearrange_micro_batches(BATCH, 8), ValueError, "row 1 has 9 tokens"),
        (lambda: rearrange_micro_batches(BATCH, 9, num_micro_batches=1), ValueError, "need 2 micro-batches"),
        (lambda: rearrange_micro_batches(BATCH, 9, length_key="none"), KeyError, "no column 'none'"),
        (lambda: rearrange_micro_batches(BATCH, 9, length_key="uid"), ValueError, "length_key='uid'"),
        (lambda: restore_dynamic_batch(torch.arange(3), [[0, 1]]), ValueError, "each of 3 rows once, got 2"),
        (lambda: restore_dynamic_batch(torch.arange(3), [[0, 1, 1]]), ValueError, "each of 3 rows once, got 3"),
        (lambda: rearrange_micro_batches(BATCH, 8, group_key="uid"), TypeError, "got list for row 0"),
        (lambda: rearrange_micro_batches(BATCH, 11, group_key="row2"), KeyError, "no column 'row2'"),
        (
            lambda: rearrange_micro_batches(GROUPED, 11, group_key="g"),
            ValueError,
            "group 'a' has 12 tokens",
        ),
        (lambda: rearrange_micro_batches(BATCH, 9, num_batches_divided_by=0), ValueError, "divided_by >= 1"),
        (lambda: rearrange_micro_batches(BATCH, 9, workload=lambda rows: -rows), ValueError, "lengths >= 0"),
        (
            lambda: rearrange_micro_batches(BATCH, 9, workload=lambda rows: rows[:1]),
            ValueError,
            "one number for each of 3 rows, got 1",
        ),
        (lambda: prepare_dynamic_batch(BATCH, 8), ValueError, "row 1 has 9 tokens"),
        (lambda: prepare_dynamic_batch(BATCH, 8, length_key="none"), KeyError, "no column 'none'"),
    ],
)
def test_invalid_arguments_of_micro_batches_are_refused_with_a_message(
    call, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_micro_batches_do_not_share_meta_info() -> None:
    batch = batch_of([1, 2, 2])
    batch.meta_info |= {"step": 1, "list": [1]}
    parts, _ = rearrange_micro_batches(batch, 2)
    assert len(parts) > 1
    parts[0].meta_info["list"].append(2)
    assert parts[1].meta_info == batch.meta_info == {"step": 1, "list": [1]}
