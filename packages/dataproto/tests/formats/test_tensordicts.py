"""Conversion between batches and TensorDicts with nested and non-tensor columns."""

from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import batches, check, make, rows_of
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tidemill_dataproto import DataProto, pad_dataproto_to_divisor, ragged

META: dict[str, Any] = {"step": 1, "none": None, "list": [1, [2]], "tuple": (1, "a"), "dict": {"float": 0.5}}


@given(batches(), st.booleans())
def test_batch_to_tensordict_and_back_is_the_identity(batch: DataProto, is_padded: bool) -> None:
    if is_padded and len(batch) > 0:
        batch, _ = pad_dataproto_to_divisor(batch, len(batch) + 1)
    batch.meta_info.update(META)
    data = batch.to_tensordict()
    assert list(data.batch_size) == [len(batch)]
    again = DataProto.from_tensordict(data)
    assert again == batch
    assert again.is_padding.tolist() == batch.is_padding.tolist()
    check(again, rows_of(batch), batch)
    for name, array in batch.non_tensor_batch.items():
        assert (again.non_tensor_batch[name].dtype, again.non_tensor_batch[name].shape) == (array.dtype, array.shape)
    for name, tensor in batch.batch.items():
        assert again[name] is tensor  # values, dtype and offsets are the same objects


def test_tensors_and_arrays_in_meta_info_come_back_as_own_copies() -> None:
    batch = make()
    batch.meta_info |= {"tensor": torch.arange(2), "dict": {"a": np.arange(3)}, "number": np.float32(0.5)}
    again = DataProto.from_tensordict(batch.to_tensordict())
    assert again == batch
    assert type(again.meta_info["number"]) is np.float32
    again.meta_info["tensor"].zero_()
    again.meta_info["list"].append(2)
    assert batch.meta_info["tensor"].tolist() == [0, 1]
    assert batch.meta_info["list"] == [1]


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1, 2], [3, 4]], dtype=np.int16),
        np.array([1.5, np.nan], dtype=np.float16),
        np.array(["a", "longer"]),
        np.array([b"a", b"bc"]),
        np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
        np.array([True, False]),
        np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
)
@pytest.mark.parametrize("num_rows", [2, 0])
def test_numpy_columns_keep_dtype_and_shape(array: np.ndarray, num_rows: int) -> None:
    batch = DataProto.from_dict({}, {"a": array[:num_rows], "o": [{"k": 1}, None][:num_rows]})
    again = DataProto.from_tensordict(batch.to_tensordict())
    assert again["a"].dtype == array.dtype
    assert again["a"].tobytes() == array[:num_rows].tobytes()
    assert again["a"].shape == array[:num_rows].shape
    assert again["o"].tolist() == batch["o"].tolist()


@pytest.mark.parametrize("batch", [DataProto(), make().select([], [])], ids=["no rows", "rows without columns"])
def test_batch_without_columns(batch: DataProto) -> None:
    again = DataProto.from_tensordict(batch.to_tensordict())
    assert again == batch
    assert len(again) == len(batch)


def test_tensordict_has_the_entries_that_verl_makes() -> None:
    data = make().to_tensordict()
    assert {name: type(value) for name, value in data.items()} == {
        "x": torch.Tensor,
        "ids": type(data["ids"]),
        "mask": type(data["mask"]),
        "uid": NonTensorStack,
        "step": NonTensorData,
        "list": NonTensorData,
    }
    assert data["ids"].layout == torch.jagged
    assert data.get("uid").tolist() == ["u0", "u1", "u2", "u3"]
    assert data.get("list").data == [1]


def test_tensordict_to_batch_and_back_is_the_identity() -> None:
    offsets = torch.tensor([0, 2, 2, 3], dtype=torch.int32)  # as flash-attention's cu_seqlens
    ids = torch.nested.nested_tensor_from_jagged(torch.arange(3), offsets)
    data = TensorDict({"ids": ids, "x": torch.zeros(3, 2, dtype=torch.bfloat16)}, [3])
    data["turns"] = NonTensorStack.from_list([NonTensorData(value) for value in ([], [0.5, 0.8], {"a": [1]})])
    data["temperature"] = NonTensorData(0.5)
    batch = DataProto.from_tensordict(data)
    assert ragged.lengths(batch["ids"]).tolist() == [2, 0, 1]
    assert batch["turns"].tolist() == [[], [0.5, 0.8], {"a": [1]}]
    assert batch.meta_info == {"temperature": 0.5}
    again = batch.to_tensordict()
    assert sorted(again.keys()) == sorted(data.keys())
    assert again["ids"] is ids
    assert again["ids"].offsets() is offsets
    assert again["x"] is data["x"]
    assert again.get("turns").tolist() == data.get("turns").tolist()
    assert again.get("temperature").data == 0.5


def test_padding_marks_survive_row_selection_of_the_tensordict() -> None:
    padded, _ = pad_dataproto_to_divisor(make().select(["x"], ["uid"]), 3)
    again = DataProto.from_tensordict(padded.to_tensordict()[torch.tensor([5, 0])])
    assert again.is_padding.tolist() == [True, False]
    assert again["uid"].tolist() == [None, "u0"]


def test_tensordict_is_not_changed_by_the_batch() -> None:
    source = TensorDict({"x": torch.arange(2)}, [2])
    batch = DataProto.from_tensordict(source, {"step": 1})
    assert batch.meta_info == {"step": 1}
    batch.batch["y"] = torch.zeros(2)
    assert list(source.keys()) == ["x"]


def test_tensordict_of_metadata_only_has_batch_size_empty() -> None:
    batch = DataProto.from_tensordict(TensorDict({"metrics": NonTensorData({"loss": 1.0})}, []))
    assert len(batch) == 0
    assert batch.meta_info == {"metrics": {"loss": 1.0}}


def nested_position_ids() -> TensorDict:
    rows = [torch.zeros(4, 2), torch.zeros(4, 3)]
    return TensorDict({"p": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [2])


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (TensorDict({}, [2, 1]), TypeError, r"batch_size \[2, 1\].*td.reshape"),
        ({"x": 1}, TypeError, r"expected a TensorDict with batch_size \[B\], got dict"),
        (TensorDict({"x": torch.ones(2)}, []), TypeError, r"columns \['x'\]; set td.batch_size = \[B\]"),
        (TensorDict({"t": NonTensorData(1)}, [2]), ValueError, "'t' is NonTensorData .*a key of meta_info; rename one"),
        (TensorDict({"x": TensorDict({}, [2])}, [2]), TypeError, "column 'x': expected a tensor, got TensorDict"),
        (nested_position_ids(), ValueError, "dim 1 ragged.*transpose"),
    ],
)
def test_from_tensordict_names_what_it_cannot_convert(data: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DataProto.from_tensordict(data, {"t": 2})


@pytest.mark.parametrize(("meta_info", "text"), [({"x": 1}, "got 'x'; rename"), ({1: 1}, "strings .*got 1; rename")])
def test_to_tensordict_needs_names_that_differ(meta_info: dict[Any, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DataProto.from_dict({"x": torch.ones(2)}, None, meta_info).to_tensordict()


def test_to_tensordict_reserves_the_name_of_padding_marks() -> None:
    batch = DataProto.from_dict({"_dataproto_padding": torch.ones(2)})
    padded, _ = pad_dataproto_to_divisor(batch, 3)
    with pytest.raises(ValueError, match="'_dataproto_padding' is reserved for the marks of padding rows; rename the"):
        padded.to_tensordict()
