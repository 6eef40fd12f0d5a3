import pytest
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dispatch import Batch, ListBatch
from tidemill_dispatch.batch import join_results, split_rows, without_padding
from tidemill_dispatch.sharding import split_call


class StrictBatch:
    """A batch whose `chunk` refuses rows that do not divide by default, like DataProto."""

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def chunk(self, chunks, allow_unequal=False):
        if len(self) % chunks and not allow_unequal:
            raise ValueError("rows do not divide")
        return [StrictBatch(part.items) for part in ListBatch(self.rows).chunk(chunks)]

    @staticmethod
    def concat(parts):
        return StrictBatch(row for part in parts for row in part.rows)


class TorchLikeBatch(ListBatch):
    """A batch that returns fewer parts than requested, like `torch.chunk`."""

    def chunk(self, n):
        return super().chunk(n)[:-1]


class Indexable:
    def chunk(self, n):
        return []

    def __len__(self):
        return 0


@pytest.mark.parametrize("batch", [ListBatch([1]), StrictBatch([1])])
def test_batch_types_satisfy_protocol(batch):
    assert isinstance(batch, Batch)


@pytest.mark.parametrize("value", [[1, 2], (1,), "text", {"a": 1}, None, 3, Indexable()])
def test_other_values_are_not_batches(value):
    assert not isinstance(value, Batch)


@given(rows=st.lists(st.integers()), n=st.integers(1, 9), kind=st.sampled_from([ListBatch, StrictBatch]))
def test_split_rows_then_concat_is_identity_and_lengths_differ_by_at_most_one(rows, n, kind):
    batch = kind(rows)
    parts = split_rows(batch, n)
    lengths = [len(part) for part in parts]
    assert len(parts) == n
    assert max(lengths) - min(lengths) <= 1
    joined = kind.concat(parts)
    assert (joined.items if kind is ListBatch else joined.rows) == rows


def test_listbatch_chunk_refuses_zero_parts():
    with pytest.raises(ValueError, match=r"chunk\(n\) requires n >= 1, got 0"):
        ListBatch([1]).chunk(0)


def test_chunk_that_loses_rows_is_refused():
    with pytest.raises(ValueError, match=r"of 5 rows returned 2 parts of \[2, 2\] rows; it must return 3 parts"):
        split_rows(TorchLikeBatch([1, 2, 3, 4, 5]), 3)


def test_split_call_splits_batches_and_shares_other_arguments():
    config = {"lr": 1}
    calls = split_call((ListBatch([1, 2, 3]), config), {"ref": ListBatch("abc"), "x": 5}, 2)
    (first_args, first_kwargs), (second_args, second_kwargs) = calls
    assert first_args[0].items == [1, 2]
    assert second_args[0].items == [3]
    assert list(first_kwargs["ref"]) == ["a", "b"]
    assert list(second_kwargs["ref"]) == ["c"]
    assert first_args[1] is config
    assert second_args[1] is config
    assert first_kwargs["x"] == second_kwargs["x"] == 5


def test_split_call_names_batches_of_different_lengths():
    with pytest.raises(ValueError, match="same number of rows; got argument 0: 2, argument 'ref': 3"):
        split_call((ListBatch([1, 2]),), {"ref": ListBatch([1, 2, 3])}, 2)


class Marked(ListBatch):
    def without_padding(self):
        return Marked([item for item in self.items if item is not None])


def test_rows_marked_as_padding_are_removed_from_results():
    assert without_padding(Marked([1, None, 2])) == Marked([1, 2])
    listed = [Marked([None])]
    assert without_padding(listed) is listed  # only from a batch itself, not inside other values
    batch = ListBatch([None])
    assert without_padding(batch) is batch


def test_join_results_concatenates_batches_and_keeps_other_results():
    assert join_results([ListBatch([1]), ListBatch([]), ListBatch([2])]) == ListBatch([1, 2])
    assert join_results([1, None, "a"]) == [1, None, "a"]
    assert join_results([]) == []


@pytest.mark.parametrize("results", [[ListBatch([1]), None], [ListBatch([1]), StrictBatch([2])]])
def test_join_results_refuses_results_of_different_types(results):
    with pytest.raises(TypeError, match=r"batches of one type on every dp rank, .*; got \['ListBatch', "):
        join_results(results)


def test_dataproto_is_a_batch():
    torch = pytest.importorskip("torch")
    data_proto = pytest.importorskip("tidemill_dataproto").DataProto
    batch = data_proto.from_dict({"x": torch.arange(5)}, meta_info={"temperature": 0.5})
    assert isinstance(batch, Batch)
    calls = split_call((batch,), {}, 3)
    parts = [args[0] for args, _ in calls]
    assert [len(part) for part in parts] == [2, 2, 1]
    joined = join_results(parts)
    assert torch.equal(joined.batch["x"], torch.arange(5))
    assert joined.meta_info == {"temperature": 0.5}


def test_meta_info_that_differs_is_reported_with_what_a_worker_can_change():
    torch = pytest.importorskip("torch")
    data_proto = pytest.importorskip("tidemill_dataproto").DataProto
    parts = [data_proto.from_dict({"x": torch.arange(2)}, meta_info={"rank": rank}) for rank in range(2)]
    with pytest.raises(ValueError, match=r"meta_info\['rank'\] .*a group calls concat without options, so return the"):
        join_results(parts)
