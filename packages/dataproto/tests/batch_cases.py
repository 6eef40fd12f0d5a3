"""Random batches, and their rows as lists for comparison."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tidemill_dataproto import DataProto, ragged

DTYPES = [torch.int64, torch.float32, torch.bool, torch.bfloat16]
OBJECTS = [None, "text", [1, 2], [], {"a": [1]}, (3, 4), np.arange(2), 5]

Row = dict[str, Any]


def fill(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    size = int(np.prod(shape))
    return (torch.arange(start, start + size) % 97).reshape(shape).to(dtype)


row_lengths = st.integers(0, 4)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0) -> DataProto:
    """Dense, ragged and numpy columns, of 0 to 6 rows; in half of the cases its TensorDict has been requested."""
    n = draw(st.integers(min_rows, 6))
    tensors: dict[str, torch.Tensor] = {}
    for i in range(draw(st.integers(0, 2))):
        trailing = draw(st.sampled_from([(), (2,), (0,), (2, 3)]))
        tensors[f"dense{i}"] = fill((n, *trailing), draw(st.sampled_from(DTYPES)), i)
    for layout in range(draw(st.integers(0, 2))):
        long = draw(st.sampled_from([1, 300]))  # long rows are copied in blocks
        equal = st.integers(0, 3).map(lambda c: [c] * n)
        counts = [c * long for c in draw(st.one_of(st.lists(row_lengths, min_size=n, max_size=n), equal))]
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
    if min_rows > 0 and not tensors and not others:
        tensors["dense0"] = fill((n,), torch.int64, 0)
    batch = DataProto.from_dict(tensors, others, {"step": 1, "nested": {"list": [1]}})
    if draw(st.booleans()):
        _ = batch.batch
    return batch


def names_of(batch: DataProto) -> list[str]:
    """The names of the tensor columns."""
    return list(batch.select()._read())


def rows_of(batch: DataProto) -> list[Row]:
    """The batch as one dict per row, by slicing values at offsets, without its TensorDict."""
    columns: dict[str, list[Any]] = {}
    for name in names_of(batch):
        column = batch.select([name])[name]
        if column.is_nested:
            flat, ends = ragged.values(column), ragged.offsets(column).tolist()
            columns[name] = [flat[a:b].tolist() for a, b in pairwise(ends)]
        else:
            columns[name] = column.tolist()
    for name, array in batch.non_tensor_batch.items():
        columns[name] = [plain(array[i]) for i in range(len(array))]
    assert all(len(column) == len(batch) for column in columns.values())
    return [{name: column[i] for name, column in columns.items()} for i in range(len(batch))]


def plain(value: Any) -> Any:
    return ("array", value.tolist()) if isinstance(value, np.ndarray) else value


def kinds_of(batch: DataProto) -> dict[str, Any]:
    tensors = {name: batch[name] for name in names_of(batch)}
    kinds: dict[str, Any] = {k: (v.dtype, v.is_nested, v.dim()) for k, v in tensors.items()}
    return kinds | {k: (v.dtype.kind, v.ndim) for k, v in batch.non_tensor_batch.items()}


def layouts_of(batch: DataProto) -> set[tuple[str, str]]:
    """Pairs of columns that share their offsets, as torch requires for operations on both."""
    columns = {name: batch[name] for name in names_of(batch) if batch[name].is_nested}
    return {(a, b) for a in columns for b in columns if ragged.offsets(columns[a]) is ragged.offsets(columns[b])}


def check(batch: DataProto, expected: list[Row], like: DataProto) -> None:
    """The rows are as expected, and nothing else about the columns has changed."""
    assert rows_of(batch) == expected
    batch.check_consistency()
    assert kinds_of(batch) == kinds_of(like)
    assert layouts_of(batch) == layouts_of(like)
    if batch.meta_info:
        assert batch.meta_info == like.meta_info
        assert batch.meta_info["nested"]["list"] is not like.meta_info["nested"]["list"]
    for name, column in batch.batch.items():
        assert batch[name] is column
        if column.is_nested:  # values and offsets fit each other, and torch can work with the column
            assert column.offsets()[0] == 0
            assert column.offsets()[-1] == column.values().shape[0]
            assert (column + 0).shape[0] == len(batch)
    assert rows_of(batch) == expected


def make(n: int = 4) -> DataProto:
    """A small batch with a dense column, two ragged ones of one layout, and objects."""
    counts = [i % 3 for i in range(n)]
    ids = ragged.ragged(torch.arange(sum(counts)), counts)
    tensors = {"x": torch.arange(n), "ids": ids, "mask": ragged.like(torch.ones(sum(counts)), ids)}
    return DataProto.from_dict(tensors, {"uid": [f"u{i}" for i in range(n)]}, {"step": 1, "list": [1]})
