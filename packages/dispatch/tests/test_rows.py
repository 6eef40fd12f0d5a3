"""Row arithmetic against plain lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dispatch import ListBatch
from tidemill_dispatch.batch import take_rows
from tidemill_dispatch.rows import balanced_lengths, part_slices, plan_shard, shard_bounds

lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6)


class Chunked:
    """A batch with the required members only: it does not support slices."""

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def chunk(self, n):
        return [Chunked(part.items) for part in ListBatch(self.rows).chunk(n)]

    @staticmethod
    def concat(parts):
        return Chunked(row for part in parts for row in part.rows)


def parts_of(part_lengths):
    """Parts of these lengths; their rows are numbered through all parts."""
    rows = iter(range(sum(part_lengths)))
    return [[next(rows) for _ in range(length)] for length in part_lengths]


def taken(parts, plan):
    return [row for rows in plan.slices for row in parts[rows.part][rows.start : rows.stop]]


@given(num_rows=st.integers(0, 50), n=st.integers(1, 9))
def test_shard_bounds_match_balanced_lengths(num_rows, n):
    lengths = balanced_lengths(num_rows, n)
    assert sum(lengths) == num_rows
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    assert [stop - start for start, stop in (shard_bounds(num_rows, n, i) for i in range(n))] == lengths
    assert [shard_bounds(num_rows, n, i)[1] for i in range(n)] == [sum(lengths[: i + 1]) for i in range(n)]


@given(data=st.data(), part_lengths=lengths)
def test_part_slices_hold_exactly_the_requested_rows(data, part_lengths):
    total = sum(part_lengths)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = part_slices(part_lengths, start, stop)
    parts = parts_of(part_lengths)
    assert [row for rows in found for row in parts[rows.part][rows.start : rows.stop]] == list(range(start, stop))
    assert len({rows.part for rows in found}) == len(found) >= 1
    if start < stop:
        assert all(rows.start < rows.stop for rows in found)


def test_rows_out_of_range_are_refused():
    with pytest.raises(ValueError, match="expected rows within 0 to 3, got 1 to 4"):
        part_slices([1, 2], 1, 4)


@given(part_lengths=lengths, n=st.integers(1, 8))
def test_unpadded_shards_are_the_rows_in_order(part_lengths, n):
    parts = parts_of(part_lengths)
    plans = [plan_shard(part_lengths, n, index, padded=False) for index in range(n)]
    shards = [taken(parts, plan) for plan in plans]
    assert shards == [part.items for part in ListBatch(list(range(sum(part_lengths)))).chunk(n)]
    assert [(plan.num_real, plan.num_rows) for plan in plans] == [(len(shard),) * 2 for shard in shards]


@given(part_lengths=lengths, n=st.integers(1, 8))
def test_padded_shards_have_one_length_and_a_row_to_pad_from(part_lengths, n):
    total = sum(part_lengths)
    parts = parts_of(part_lengths)
    plans = [plan_shard(part_lengths, n, index, padded=True) for index in range(n)]
    assert {plan.num_rows for plan in plans} == {-(-total // n)}
    own = [row for plan in plans for row in taken(parts, plan)[: plan.num_real]]
    assert own == list(range(total))
    for plan in plans:
        assert len(taken(parts, plan)) == max(plan.num_real, min(total, 1))


@given(data=st.data(), num_rows=st.integers(0, 12))
def test_take_rows_by_slice_equals_take_rows_by_chunk(data, num_rows):
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    rows = list(range(num_rows))
    assert take_rows(ListBatch(rows), start, stop).items == rows[start:stop]
    assert take_rows(Chunked(rows), start, stop).rows == rows[start:stop]
