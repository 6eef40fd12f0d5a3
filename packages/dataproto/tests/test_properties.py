"""Every operation on random batches, against the same operation on a plain list of rows."""

import copy
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tidemill_dataproto import DataProto, ragged

settings.register_profile("tidemill", deadline=None, max_examples=60)
settings.load_profile("tidemill")

DTYPES = [torch.int64, torch.float32, torch.bool, torch.bfloat16]
OBJECTS = [None, "text", [1, 2], [], {"a": [1]}, (3, 4), np.arange(2), 5]


def fill(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    size = int(np.prod(shape))
    return (torch.arange(start, start + size) % 97).reshape(shape).to(dtype)


@st.composite
def batches(draw: st.DrawFn) -> DataProto:
    n = draw(st.integers(0, 6))
    tensors: dict[str, torch.Tensor] = {}
    for i in range(draw(st.integers(0, 2))):
        trailing = draw(st.sampled_from([(), (2,), (0,), (2, 3)]))
        tensors[f"dense{i}"] = fill((n, *trailing), draw(st.sampled_from(DTYPES)), i)
    for layout in range(draw(st.integers(0, 2))):
        counts = draw(
            st.one_of(st.lists(st.integers(0, 4), min_size=n, max_size=n), st.integers(0, 3).map(lambda c: [c] * n))
        )
        first = ragged.ragged(fill((sum(counts),), torch.int64, layout), counts)
        tensors[f"ragged{layout}"] = first
        if draw(st.booleans()):
            trailing = draw(st.sampled_from([(), (3,)]))
            dtype = draw(st.sampled_from(DTYPES))
            tensors[f"ragged{layout}like"] = ragged.like(fill((sum(counts), *trailing), dtype, layout + 5), first)
    others: dict[str, Any] = {}
    if draw(st.booleans()):
        others["objects"] = draw(st.lists(st.sampled_from(OBJECTS), min_size=n, max_size=n))
    if draw(st.booleans()):
        others["lists"] = [[i, i] for i in range(n)]
    if draw(st.booleans()):
        others["numbers"] = np.arange(n, dtype=np.float32)
        others["strings"] = np.array([f"s{i}" for i in range(n)], dtype="U4")
    return DataProto.from_dict(tensors, others, {"step": 1, "nested": {"list": [1]}})


def plain(value: Any) -> Any:
    return ("array", value.tolist()) if isinstance(value, np.ndarray) else value


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """The batch as one dict per row, read with torch's and numpy's own indexing of single rows."""
    columns: dict[str, list[Any]] = {}
    for name, column in ({} if batch.batch is None else batch.batch).items():
        if column.is_nested:
            ends = column.offsets().tolist()
            columns[name] = [column.values()[a:b].tolist() for a, b in pairwise(ends)]
        else:
            columns[name] = column.tolist()
    for name, array in batch.non_tensor_batch.items():
        columns[name] = [plain(array[i]) for i in range(len(array))]
    assert all(len(column) == len(batch) for column in columns.values())
    return [{name: column[i] for name, column in columns.items()} for i in range(len(batch))]


def check(batch: DataProto, expected: list[dict[str, Any]], like: DataProto) -> None:
    """The rows are as expected, and nothing else about the columns has changed."""
    assert rows_of(batch) == expected
    batch.check_consistency()
    assert (batch.batch is None) == (like.batch is None)
    kinds, like_kinds = ({k: (v.dtype, v.is_nested) for k, v in b._tensors().items()} for b in (batch, like))
    assert kinds == like_kinds
    assert {k: (v.dtype.kind, v.ndim) for k, v in batch.non_tensor_batch.items()} == {
        k: (v.dtype.kind, v.ndim) for k, v in like.non_tensor_batch.items()
    }
    for column in batch._tensors().values():
        if column.is_nested:  # values and offsets fit each other, and torch can work with the column
            assert column.offsets()[0] == 0
            assert column.offsets()[-1] == column.values().shape[0]
            assert (column + 0).shape[0] == len(batch)
    layouts, like_layouts = (
        {(a, b) for a in b_ for b in b_ if b_[a].offsets() is b_[b].offsets()}
        for b_ in ({k: v for k, v in b._tensors().items() if v.is_nested} for b in (batch, like))
    )
    assert layouts == like_layouts
    if batch.meta_info:
        assert batch.meta_info == like.meta_info
        assert batch.meta_info["nested"]["list"] is not like.meta_info["nested"]["list"]


def parts_bounds(n: int, parts: int) -> list[int]:
    return [len(piece) for piece in np.array_split(np.arange(n), parts)]


@given(batches(), st.integers(1, 8))
def test_chunk_then_concat_is_the_identity(batch: DataProto, n: int) -> None:
    rows = rows_of(batch)
    parts = batch.chunk(n, allow_unequal=True)
    assert [len(part) for part in parts] == (parts_bounds(len(batch), n) if batch else [0] * n)
    start = 0
    for part in parts:
        check(part, rows[start : start + len(part)], batch)
        start += len(part)
    check(DataProto.concat(parts), rows, batch)
    if len(batch) % n == 0:
        assert [rows_of(part) for part in batch.chunk(n)] == [rows_of(part) for part in parts]
    else:
        with pytest.raises(ValueError, match="allow_unequal"):
            batch.chunk(n)


@given(batches(), st.integers(1, 4))
def test_split_then_concat_is_the_identity(batch: DataProto, size: int) -> None:
    parts = batch.split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert [row for part in parts for row in rows_of(part)] == rows_of(batch)
    check(DataProto.concat(parts), rows_of(batch), batch)


@given(batches(), st.data())
def test_index_takes_the_same_rows_as_a_list(batch: DataProto, data: st.DataObject) -> None:
    rows, n = rows_of(batch), len(batch)
    index = data.draw(st.lists(st.integers(-n, max(n - 1, -n)), max_size=8 if n > 0 else 0))

    expected = [rows[i] for i in index]
    for form in (index, torch.tensor(index, dtype=torch.int32), np.array(index, dtype=np.int64), tuple(index)):
        check(batch[form], expected, batch)
    mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    expected = [row for row, keep in zip(rows, mask, strict=True) if keep]
    for form in (mask, torch.tensor(mask), np.array(mask)):
        check(batch[form], expected, batch)


@given(batches(), st.data())
def test_slice_takes_the_same_rows_as_a_list(batch: DataProto, data: st.DataObject) -> None:
    edge = st.none() | st.integers(-8, 8)
    item = slice(data.draw(edge), data.draw(edge), data.draw(st.sampled_from([None, 1, 2, -1, -3])))
    check(batch[item], rows_of(batch)[item], batch)


@given(batches(), st.randoms(use_true_random=False))
def test_reorder_then_its_inverse_is_the_identity(batch: DataProto, random: Any) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)
    moved = batch.reorder(order)
    check(moved, [rows_of(batch)[i] for i in order], batch)
    check(moved.reorder(torch.tensor(order, dtype=torch.int64).argsort()), rows_of(batch), batch)


@given(batches(), st.integers(0, 3))
def test_repeat(batch: DataProto, times: int) -> None:
    rows = rows_of(batch)
    check(batch.repeat(times), [row for row in rows for _ in range(times)], batch)
    check(batch.repeat(times, interleave=False), rows * times, batch)


@given(batches(), st.integers(1, 4), st.integers(0, 3))
def test_iterator_yields_every_row_once_per_epoch(batch: DataProto, size: int, epochs: int) -> None:
    in_order = [row for part in batch.make_iterator(size, epochs=epochs, shuffle=False) for row in rows_of(part)]
    assert in_order == rows_of(batch) * epochs
    numbered = DataProto.from_dict({"row": torch.arange(len(batch))}).union(batch)
    seen = [part["row"].tolist() for part in numbered.make_iterator(size, epochs=epochs, seed=3)]
    assert seen == [part["row"].tolist() for part in numbered.make_iterator(size, epochs=epochs, seed=3)]
    flat = [row for part in seen for row in part]
    for epoch in range(epochs):
        assert sorted(flat[epoch * len(batch) : (epoch + 1) * len(batch)]) == list(range(len(batch)))
    assert all(0 < len(part) <= size for part in seen)


@given(batches(), st.sampled_from([2, 3, 4, 5]))
def test_pickle_in_band_is_the_identity(batch: DataProto, protocol: int) -> None:
    check(pickle.loads(pickle.dumps(batch, protocol)), rows_of(batch), batch)


@given(batches())
def test_pickle_out_of_band_is_the_identity(batch: DataProto) -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    check(pickle.loads(data, buffers=buffers), rows_of(batch), batch)
    read_only = [bytes(buffer.raw()) for buffer in buffers]
    check(pickle.loads(data, buffers=read_only), rows_of(batch), batch)


@given(batches())
def test_copies_are_equal_and_apart(batch: DataProto) -> None:
    for new in (batch.clone(), copy.deepcopy(batch)):
        check(new, rows_of(batch), batch)
        for name, column in new._tensors().items():
            if (column.values() if column.is_nested else column).numel() > 0:
                new_data, old_data = (c.values() if c.is_nested else c for c in (column, batch[name]))
                assert new_data.data_ptr() != old_data.data_ptr()
    check(batch.to("cpu"), rows_of(batch), batch)


@given(batches(), st.data())
def test_columns_go_apart_and_together(batch: DataProto, data: st.DataObject) -> None:
    before = rows_of(batch)
    tensor_names = data.draw(st.sets(st.sampled_from(sorted(batch._tensors()) or ["none"]))) - {"none"}
    other_names = data.draw(st.sets(st.sampled_from(sorted(batch.non_tensor_batch) or ["none"]))) - {"none"}
    chosen = [{name: row[name] for name in [*tensor_names, *other_names]} for row in before]
    assert rows_of(batch.select(sorted(tensor_names), sorted(other_names), [])) == chosen
    assert rows_of(batch) == before
    rest = batch.select()
    popped = rest.pop(sorted(tensor_names), sorted(other_names), ["step"])
    assert rows_of(popped) == chosen
    assert popped.meta_info == {"step": 1}
    assert rest.meta_info == {"nested": {"list": [1]}}
    assert len(popped) == len(rest) == len(batch)
    assert rows_of(batch) == before
    assert rows_of(rest.union(popped)) == before


@given(batches())
def test_repr_names_every_column(batch: DataProto) -> None:
    text = repr(batch)
    assert text.startswith(f"DataProto({len(batch)} rows, ")
    assert all(name in text for name in [*batch._tensors(), *batch.non_tensor_batch, "nested"])
