"""Row arithmetic against plain lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dispatch import ListBatch
from tidemill_dispatch.batch import take_rows
from tidemill_dispatch.rows import balanced_lengths, bounds, cuts, plan_shard

lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6)


class Chunked:
    """A batch with nothing but what the protocol asks for: no slices."""

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
    """Parts of those lengths, whose rows count on from part to part."""
    rows = iter(range(sum(part_lengths)))
    return [[next(rows) for _ in range(length)] for length in part_lengths]


def taken(parts, plan):
    return [row for cut in plan.cuts for row in parts[cut.part][cut.start : cut.stop]]


@given(num_rows=st.integers(0, 50), n=st.integers(1, 9))
def test_bounds_are_those_of_the_balanced_lengths(num_rows, n):
    lengths = balanced_lengths(num_rows, n)
    assert sum(lengths) == num_rows
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    assert [stop - start for start, stop in (bounds(num_rows, n, i) for i in range(n))] == lengths
    assert [bounds(num_rows, n, i)[1] for i in range(n)] == [sum(lengths[: i + 1]) for i in range(n)]


@given(data=st.data(), part_lengths=lengths)
def test_cuts_hold_exactly_the_rows_asked_for(data, part_lengths):
    total = sum(part_lengths)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = cuts(part_lengths, start, stop)
    parts = parts_of(part_lengths)
    assert [row for cut in found for row in parts[cut.part][cut.start : cut.stop]] == list(range(start, stop))
    assert len({cut.part for cut in found}) == len(found) >= 1
    if start < stop:
        assert all(cut.start < cut.stop for cut in found)


def test_rows_that_are_not_there():
    with pytest.raises(ValueError, match=r"rows 1 to 4 are not among the 3 rows of parts of \[1, 2\]"):
        cuts([1, 2], 1, 4)


@given(part_lengths=lengths, n=st.integers(1, 8))
def test_the_shards_of_a_result_are_its_rows_in_order(part_lengths, n):
    parts = parts_of(part_lengths)
    plans = [plan_shard(part_lengths, n, index, padded=False) for index in range(n)]
    shards = [taken(parts, plan) for plan in plans]
    assert shards == [part.items for part in ListBatch(list(range(sum(part_lengths)))).chunk(n)]
    assert [(plan.num_real, plan.num_rows) for plan in plans] == [(len(shard),) * 2 for shard in shards]


@given(part_lengths=lengths, n=st.integers(1, 8))
def test_padded_shards_are_of_one_length_and_have_a_row_to_make_padding_from(part_lengths, n):
    total = sum(part_lengths)
    parts = parts_of(part_lengths)
    plans = [plan_shard(part_lengths, n, index, padded=True) for index in range(n)]
    assert {plan.num_rows for plan in plans} == {-(-total // n)}
    own = [row for plan in plans for row in taken(parts, plan)[: plan.num_real]]
    assert own == list(range(total))
    for plan in plans:
        assert len(taken(parts, plan)) == max(plan.num_real, min(total, 1))


@given(data=st.data(), num_rows=st.integers(0, 12))
def test_rows_are_taken_alike_by_slices_and_by_chunks(data, num_rows):
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    rows = list(range(num_rows))
    assert take_rows(ListBatch(rows), start, stop).items == rows[start:stop]
    assert take_rows(Chunked(rows), start, stop).rows == rows[start:stop]
