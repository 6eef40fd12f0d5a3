"""Splitting of a call's arguments, and padding of shards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dispatch import ListBatch, Padding, Replicate, Shard
from tidemill_dispatch.batch import join_results
from tidemill_dispatch.sharding import DeferredRows, DeferredShard, PaddedShard, split_call

PAD = "padding"


def pad(batch, divisor):
    count = -len(batch) % divisor
    return ListBatch([*batch.items, *[PAD] * count]), count


def unpad(batch, count):
    assert batch.items[len(batch) - count :] == [PAD] * count
    return ListBatch(batch.items[: len(batch) - count])


padding = Padding(pad=pad, unpad=unpad)


class Later(DeferredRows):
    def chunk(self, n):
        return [DeferredShard(self, index, n) for index in range(n)]


class Lumpy(ListBatch):
    """A batch whose first part has all rows except one."""

    def chunk(self, n):
        cut = max(len(self) - 1, 0)
        return [ListBatch(self.items[:cut]), ListBatch(self.items[cut:]), *[ListBatch([])] * (n - 2)]


def first_args(calls):
    return [args[0] for args, _ in calls]


@given(rows=st.lists(st.integers(), max_size=12), n=st.integers(1, 6))
def test_pad_then_unpad_is_identity_and_padded_shards_have_one_length(rows, n):
    results, lengths = [], set()
    for shard in first_args(split_call((ListBatch(rows),), {}, n, padding)):
        padded = shard.pad(padding) if isinstance(shard, PaddedShard) else shard
        lengths.add(len(padded))
        results.append(shard.unpad(padded, padding) if isinstance(shard, PaddedShard) else padded)
    assert lengths == {-(-len(rows) // n)}
    assert join_results(results) == ListBatch(rows)


def test_shards_without_rows_are_all_padding():
    shards = first_args(split_call((ListBatch(["a"]),), {}, 3, padding))
    assert [(s.pad(padding).items, s.num_real) for s in shards] == [(["a"], 1), ([PAD], 0), ([PAD], 0)]
    assert shards[2].unpad(ListBatch([PAD]), padding).items == []
    assert shards[0].rows is not shards[1].rows
    assert shards[1].rows is shards[2].rows  # sent once


def test_padded_method_returns_all_rows_real_rows_or_no_batch():
    shard = first_args(split_call((ListBatch([1, 2, 3]),), {}, 2, padding))[1]
    assert shard.unpad({"loss": 1.0}, padding) == {"loss": 1.0}
    assert shard.unpad(ListBatch([]), padding) == ListBatch([])
    assert shard.unpad(ListBatch([3, PAD]), padding) == ListBatch([3])
    assert shard.unpad(ListBatch([3]), padding) == ListBatch([3])  # as DataProto.concat of its parts would be
    with pytest.raises(ValueError, match="received 2 rows, 1 of them real, and returned 4 rows; it must"):
        shard.unpad(ListBatch([3, PAD] * 2), padding)


def test_pad_function_that_adds_too_many_rows_is_refused():
    shard = first_args(split_call((ListBatch([1, 2, 3]),), {}, 2, padding))[1]
    twice = Padding(pad=lambda batch, divisor: (ListBatch([*batch.items, *[PAD] * 5]), 5), unpad=unpad)
    with pytest.raises(ValueError, match="must add the fewest rows that make 1 rows a multiple of 2, got 6 rows"):
        shard.pad(twice)


def test_shard_splits_lists_and_replicate_sends_batches_whole():
    batch = ListBatch(list("abc"))
    calls = split_call((batch, Shard([1, 2, 3])), {"all": Replicate(batch), "t": Shard((4, 5, 6)), "x": [7, 8, 9]}, 2)
    assert [args for args, _ in calls] == [(ListBatch(["a", "b"]), [1, 2]), (ListBatch(["c"]), [3])]
    assert [kwargs for _, kwargs in calls] == [
        {"all": batch, "t": (4, 5), "x": [7, 8, 9]},
        {"all": batch, "t": (6,), "x": [7, 8, 9]},
    ]
    assert calls[0][1]["all"] is batch


def test_shard_splits_arrays_tensors_and_tensordicts():
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    array, tensor = np.arange(10).reshape(5, 2), torch.arange(5)
    calls = split_call((Shard(array), Shard(tensor)), {}, 3)
    assert [len(a) for a in first_args(calls)] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate(first_args(calls)), array)
    assert torch.equal(torch.cat([args[1] for args, _ in calls]), tensor)
    table = pytest.importorskip("tensordict").TensorDict({"x": tensor}, batch_size=[5])
    parts = first_args(split_call((Shard(table),), {}, 3))
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("value", [3, None, {"a": 1}, "abc", {1, 2}])
def test_shard_refuses_values_without_rows(value):
    message = rf"argument 'x' is Shard\({type(value).__name__}\), which has no rows"
    with pytest.raises(TypeError, match=message):
        split_call((), {"x": Shard(value)}, 2)


def test_batches_of_different_lengths_are_named():
    with pytest.raises(ValueError, match="same number of rows; got argument 0: 2, argument 'ref': 3"):
        split_call((ListBatch([1, 2]),), {"ref": Shard([1, 2, 3])}, 2)
    with pytest.raises(ValueError, match=r"same lengths; got argument 0: \[3, 1\], argument 'ref': \[2, 2\]"):
        split_call((Lumpy([1, 2, 3, 4]),), {"ref": ListBatch([1, 2, 3, 4])}, 2)
    with pytest.raises(ValueError, match=r"argument 'x' has 3 rows, .* only batches can be padded"):
        split_call((), {"x": Shard([1, 2, 3])}, 2, padding)


def test_deferred_rows_are_split_without_their_values():
    later = Later()
    alone = first_args(split_call((later,), {}, 2))
    assert [(s.source, s.index, s.n, s.num_real, s.padded) for s in alone] == [
        (later, 0, 2, None, False),
        (later, 1, 2, None, False),
    ]
    calls = split_call((Shard(later), ListBatch([1, 2, 3])), {"whole": Replicate(later)}, 2, padding)
    assert [(args[0].num_real, args[0].padded) for args, _ in calls] == [(2, True), (1, True)]
    assert all(kwargs["whole"] is later for _, kwargs in calls)


def test_shard_of_a_tensor_without_slices_is_named():
    torch = pytest.importorskip("torch")
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    for value in (torch.tensor(1.0), nested):
        with pytest.raises(TypeError, match=r"argument 'x' is Shard\(.*Tensor\), which cannot be split by rows: "):
            split_call((), {"x": Shard(value)}, 2)
