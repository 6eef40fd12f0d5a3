"""DataProto: construction, isolation of inputs, and columns."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import make
from tidemill_dataproto import DataProto, pad_dataproto_to_divisor, ragged

# Construction


def test_from_single_dict_sorts_columns_by_kind() -> None:
    batch = DataProto.from_single_dict({"x": torch.zeros(2), "uid": ["a", "b"], "n": np.arange(2)}, {"k": 1})
    assert list(batch.batch.keys()) == ["x"]
    assert sorted(batch.non_tensor_batch) == ["n", "uid"]
    assert batch.meta_info == {"k": 1}


def test_construction_does_not_change_its_inputs() -> None:
    tensors, others, meta = {"x": torch.zeros(2)}, {"uid": [[1], [2]]}, {"list": [1]}
    batch = DataProto.from_dict(tensors, others, meta)
    batch.meta_info["list"].append(2)
    batch.meta_info["new"] = 1
    batch.batch["y"] = torch.ones(2)
    batch.non_tensor_batch["z"] = np.arange(2)
    assert list(tensors) == ["x"]
    assert others == {"uid": [[1], [2]]}
    assert meta == {"list": [1]}
    again = DataProto(batch.batch, batch.non_tensor_batch, batch.meta_info)
    again.meta_info["list"].append(3)
    assert batch.meta_info["list"] == [1, 2]
    assert again.batch is batch.batch


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2], [3, 4]],
        [(1, 2), (3, 4)],
        [np.zeros(2), np.ones(2)],
        [np.zeros((2, 2)), np.ones((2, 2))],
        [[], []],
        [[[1]], [[2]]],
        ["ab", "cd"],
        [{"a": 1}, None],
    ],
)
def test_object_columns_have_one_dim(rows: list[Any]) -> None:
    batch = DataProto.from_dict(non_tensors={"c": rows})
    copied, doubled = pickle.loads(pickle.dumps(batch)), DataProto.concat([batch, batch])
    for b in (batch, batch[[1, 0]], batch.repeat(2), doubled, copied):
        assert b["c"].shape == (len(b),)
        assert b["c"].dtype == object
        assert type(b["c"][0]) is type(rows[0]) or b["c"][0] is None
    assert batch["c"][0] is rows[0]
    one = DataProto.from_dict(non_tensors={"c": rows[:1]})
    assert one["c"].shape == (1,)


def test_two_dimensional_object_arrays_become_lists() -> None:
    equal, unequal = np.array([[1, 2], [3, 4]], dtype=object), np.array([[1, 2], [3]], dtype=object)
    for array in (equal, unequal):
        assert type(DataProto.from_dict(non_tensors={"c": array})["c"][0]) is list


def test_batch_without_columns_and_rows() -> None:
    batch = DataProto()
    assert len(batch) == 0
    assert [len(part) for part in batch.chunk(3)] == [0, 0, 0]
    assert len(DataProto.concat([batch, batch])) == 0
    assert len(batch.union(make())) == 4
    assert len(make().union(batch)) == 4


def test_number_of_rows_is_kept_without_columns() -> None:
    batch = make().select([], [])
    assert len(batch) == 4
    assert len(DataProto.concat(batch.chunk(2))) == 4
    assert len(make().select(None, []).select([])) == 4
    only_other = DataProto.from_dict(non_tensors={"uid": ["a", "b"]})
    only_other.pop(non_tensor_batch_keys=["uid"])
    assert len(only_other) == 2


# Isolation


@pytest.mark.parametrize(
    "operation",
    [
        lambda b: b.chunk(2)[0],
        lambda b: b.split(2)[0],
        lambda b: b[1:3],
        lambda b: b[[0]],
        lambda b: b.select(["x"]),
        lambda b: b.select(meta_info_keys=["list"]),
        lambda b: b.repeat(2),
        lambda b: b.reorder([3, 2, 1, 0]),
        lambda b: b.rename("x", "y"),
        lambda b: b.to("cpu"),
        lambda b: b.clone(),
        lambda b: b.union(DataProto()),
        lambda b: DataProto().union(b),
        lambda b: DataProto.concat([b]),
        lambda b: next(b.make_iterator(2)),
    ],
)
def test_results_share_neither_meta_info_nor_dicts_of_columns(operation) -> None:
    batch = make()
    new = operation(batch)
    new.meta_info["list"].append(2)
    new.batch["more"] = torch.zeros(len(new))
    new.non_tensor_batch["also"] = np.zeros(len(new))
    assert batch.meta_info == {"step": 1, "list": [1]}
    assert "more" not in batch
    assert "also" not in batch
    assert list(batch.batch.keys()) == ["x", "ids", "mask"]


def test_chunks_do_not_share_meta_info() -> None:
    first, second = make().chunk(2)
    first.meta_info["list"].append(2)
    assert second.meta_info["list"] == [1]


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda b: DataProto.from_dict({"y": torch.zeros(4)}, meta_info={"inner": b}).select().meta_info["inner"],
    ],
)
def test_copies_keep_devices_and_gradients(copied) -> None:
    weight = torch.ones(10, requires_grad=True)
    ids = ragged.ragged(weight * 3, [1, 2, 3, 4])
    batch = DataProto.from_dict({"w": weight[:4] * 2, "ids": ids, "again": ragged.like(weight * 2, ids)})
    new = copied(batch)
    assert type(new) is DataProto
    assert new == batch
    assert ragged.offsets(new["ids"]) is ragged.offsets(new["again"])
    (new["w"].sum() + ragged.values(new["ids"]).sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0] * 4 + [3.0] * 6
    assert {column.device.type for column in copied(make().to("meta")).batch.values()} == {"meta"}


def test_deep_copy_shares_nothing_with_its_source() -> None:
    value = {"list": [1]}
    batch = DataProto.from_dict({"x": torch.zeros(1)}, {"o": [[value]], "n": np.zeros(1)})
    batch.meta_info["key"] = value
    padded, _ = pad_dataproto_to_divisor(batch, 2)
    for source in (batch, padded):
        new = copy.deepcopy(source)
        assert new == source
        new["x"].add_(1)
        new["n"][:] = 1
        new["o"][0][0]["list"].append(2)
        assert source["x"].sum() == source["n"].sum() == 0
        assert value == {"list": [1]}
    assert copy.deepcopy(padded).is_padding.tolist() == [False, True]
    new = copy.deepcopy(batch)
    assert new.meta_info["key"] is new["o"][0][0]


def test_slices_are_views_and_indexing_copies() -> None:
    batch = make()
    assert batch[1:]["x"].data_ptr() == batch["x"][1:].data_ptr()
    assert batch.chunk(2)[1]["ids"].values().data_ptr() == batch["ids"].values()[1:].data_ptr()
    taken = batch[[0, 1, 2, 3]]
    taken["x"].zero_()
    assert batch["x"].tolist() == [0, 1, 2, 3]


# Columns


def test_pop_is_atomic() -> None:
    batch = make()
    with pytest.raises(KeyError, match=r"no non-tensor column 'none'; known: \['uid'\]"):
        batch.pop(["x"], ["none"])
    with pytest.raises(KeyError, match="no meta_info key 'none'"):
        batch.pop(["x"], meta_info_keys=["none"])
    assert list(batch.batch.keys()) == ["x", "ids", "mask"]
    assert "uid" in batch
    assert list(batch.pop().batch.keys()) == []
    assert list(batch.batch.keys()) == ["x", "ids", "mask"]


def test_rename_tensor_and_numpy_columns() -> None:
    batch = make().rename(["x", "uid"], ["y", "name"])
    assert list(batch.batch.keys()) == ["y", "ids", "mask"]
    assert list(batch.non_tensor_batch) == ["name"]
    swapped = make().rename(["ids", "mask"], ["mask", "ids"])
    assert swapped["mask"].dtype == torch.int64
    for old, new in ((["x"], ["ids"]), (["x", "ids"], ["a", "a"]), (["x"], ["uid"])):
        with pytest.raises(ValueError, match="one name"):
            make().rename(old, new)
    with pytest.raises(ValueError, match="the same number of old and new names"):
        make().rename(["x"], ["a", "b"])
    with pytest.raises(KeyError, match="no column 'none'"):
        make().rename("none", "a")


def test_failed_union_changes_nothing() -> None:
    batch, other = make(), DataProto.from_dict({"new": torch.ones(4), "x": torch.zeros(4, dtype=torch.int64)})
    with pytest.raises(ValueError, match="column 'x' has different values in the two batches"):
        batch.union(other)
    with pytest.raises(ValueError, match="4 and 2"):
        batch.union(make(2))
    with pytest.raises(ValueError, match="'step'"):
        batch.union(DataProto.from_dict({"new": torch.ones(4)}, meta_info={"step": 2}))
    assert "new" not in batch
    both = batch.union(DataProto.from_dict({"new": torch.ones(4)}, {"uid": batch["uid"].copy()}, {"loss": 2}))
    assert list(both.batch.keys()) == ["x", "ids", "mask", "new"]
    assert both.meta_info == {"step": 1, "list": [1], "loss": 2}


def test_union_of_equal_columns_with_nan() -> None:
    nan = {"a": torch.tensor([1.0, float("nan")]), "b": ragged.ragged(torch.tensor([float("nan")]), [0, 1])}
    other = {"c": np.array([float("nan"), 1.0]), "d": [float("nan"), np.array([float("nan")])]}
    copied = DataProto.from_dict(nan, other).clone()
    assert len(DataProto.from_dict(nan, other).union(copied)) == 2
    with pytest.raises(ValueError, match="'b'"):
        DataProto.from_dict(nan).union(DataProto.from_dict({"b": ragged.ragged(torch.tensor([float("nan")]), [1, 0])}))
    with pytest.raises(ValueError, match="'a'"):
        DataProto.from_dict(nan).union(DataProto.from_dict({"a": torch.tensor([1.0, 2.0])}))


def test_columns_that_share_a_layout_with_a_common_column_share_it_after_union() -> None:
    batch, other = make(), make().clone().select(["ids", "mask"], [], []).rename("mask", "weight")
    assert batch["ids"].offsets() is not other["ids"].offsets()
    both = batch.union(other)
    assert both["ids"] is batch["ids"]
    assert (both["ids"] + both["mask"] + both["weight"]).shape[0] == len(batch)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_views_of_the_same_memory_are_equal(dtype: torch.dtype) -> None:
    batch = DataProto.from_dict({"x": torch.tensor([1.0, float("nan"), 2.0]).to(dtype)})
    assert batch[:2] == batch[:2]
    assert batch[:1] != batch[2:]


def test_to_moves_values_and_offsets() -> None:
    moved = make().to("meta")
    assert {name: str(c.device) for name, c in moved.batch.items()} == dict.fromkeys(["x", "ids", "mask"], "meta")
    assert moved["ids"].offsets().device.type == "meta"
    assert moved["ids"].offsets() is moved["mask"].offsets()


def test_row_operations_in_inference_mode() -> None:
    batch = make()
    with torch.inference_mode():
        parts = [batch[1:], batch[[0, 2]], *batch.chunk(2), DataProto.concat([batch, batch]), batch.clone()]
        parts.append(pickle.loads(pickle.dumps(batch)))
    assert [len(part) for part in parts] == [3, 2, 2, 2, 8, 4, 4]


def test_repr_shows_columns_shapes_dtypes_and_bytes() -> None:
    batch = DataProto.from_dict(
        {"x": torch.zeros(2, 3), "ids": ragged.ragged(torch.zeros(600, 2).bfloat16(), [0, 600])},
        {"n": np.zeros((2, 4), np.int16), "uid": ["a", "b"]},
        {"step": 1, "metrics": {}},
    )
    assert repr(batch).splitlines() == [
        "DataProto(2 rows, 2.4 KiB",
        "  x: float32 [B, 3] on cpu",
        "  ids: bfloat16 [B, j, 2] on cpu, rows of 0 to 600",
        "  n: int16 [B, 4], numpy",
        "  uid: object [B], numpy",
        "  meta_info: step, metrics)",
    ]
    assert repr(DataProto()) == "DataProto(0 rows, 0 B)"


def test_num_batch_dims_checks_that_tensors_share_leading_dims() -> None:
    tensors = {"a": torch.zeros(2, 3, 4), "b": torch.arange(6).reshape(2, 3)}
    batch = DataProto.from_dict(tensors, num_batch_dims=2)
    assert len(batch) == 2
    assert batch["a"].shape == (2, 3, 4)
    assert batch.unfold()["b"].tolist() == [0, 1, 2, 3, 4, 5]
    for bad, text in [
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, r"same first 2 dims, got {'a': \[2, 3\], 'b': \[2, 4\]}"),
        ({"a": torch.zeros(2)}, r"got {'a': \[2\]}"),
        ({"a": ragged.ragged(torch.zeros(2), [2])}, "got {'a': 'ragged'}"),
    ]:
        with pytest.raises(ValueError, match=text):
            DataProto.from_dict(bad, num_batch_dims=2)
    with pytest.raises(ValueError, match="expected tensors only with num_batch_dims=2"):
        DataProto.from_dict(tensors, {"uid": ["a", "b"]}, num_batch_dims=2)
    with pytest.raises(ValueError, match="num_batch_dims >= 1, got 0"):
        DataProto.from_dict(tensors, num_batch_dims=0)


def test_unfold_column_chunks_keeps_padding_marks_and_names_what_does_not_divide() -> None:
    ids = ragged.ragged(torch.arange(6), [4, 2])
    batch = DataProto.from_dict({"ids": ids, "x": torch.arange(8).reshape(2, 4)}, {"o": [[1, 2], "ab"]})
    padded, _ = pad_dataproto_to_divisor(batch, 3)
    split = padded.unfold_column_chunks(2, ["ids", "x"])
    assert split.is_padding.tolist() == [False] * 4 + [True] * 2
    assert [row.tolist() for row in split["ids"].unbind()][:4] == [[0, 1], [2, 3], [4], [5]]
    assert split["x"].tolist()[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for n, names, error, text in [
        (4, ["ids"], ValueError, "column 'ids': row 1 has 2 elements, which do not divide into 4 parts"),
        (3, ["x"], ValueError, r"column 'x' \[2, 4\] does not divide along dim 1 into 3 parts; leave it out"),
        (2, ["o"], ValueError, "column 'o': expected a list in row 1 to split, got str"),
        (2, ["none"], KeyError, "no column 'none'"),
        (0, ["x"], ValueError, "n_split >= 1, got 0"),
    ]:
        with pytest.raises(error, match=text):
            batch.unfold_column_chunks(n, names)


def test_from_dict_and_fold_do_not_change_their_inputs() -> None:
    tensors, others, meta = {"x": torch.arange(4)}, {"o": [[1], [2], [3], [4]]}, {"list": []}
    batch = DataProto.from_dict(tensors, others, meta)
    before = batch.clone()
    folded = batch.fold(2)
    folded.meta_info["list"].append(1)
    folded.non_tensor_batch["o"][0].append(5)
    assert batch == before
    assert (list(tensors), others, meta) == (["x"], {"o": [[1], [2], [3], [4]]}, {"list": []})
    assert tensors["x"].shape == (4,)


@pytest.mark.parametrize("lengths", [[3, 3, 3], [3], [0], [0, 0], []])
def test_rows_of_equal_length_and_single_rows_stay_ragged(lengths: list[int]) -> None:
    column = ragged.ragged(torch.arange(sum(lengths)), lengths)
    batch = DataProto.from_dict({"ids": column})
    for new in (
        DataProto.concat(batch.chunk(max(len(lengths), 1))),
        batch[list(range(len(lengths)))],
        batch[:],
        pickle.loads(pickle.dumps(batch)),
        batch.to("cpu"),
        DataProto.concat([batch[:0], batch]),
    ):
        assert ragged.lengths(new["ids"]).tolist() == lengths
        assert ragged.values(new["ids"]).tolist() == list(range(sum(lengths)))
        assert ragged.values(new["ids"] + 1).tolist() == list(range(1, sum(lengths) + 1))


def test_3d_position_ids_stay_ragged_in_dim_1() -> None:
    rows = [torch.arange(12).reshape(4, 3), torch.arange(12).reshape(4, 3) + 100]  # equally long
    batch = DataProto.from_dict({"position_ids": ragged.ragged_from_list(rows)})
    for new in (DataProto.concat(batch.chunk(2)), batch[[0, 1]], pickle.loads(pickle.dumps(batch))):
        for row, expected in zip(new, rows, strict=True):
            assert torch.equal(row.batch["position_ids"], expected)


def test_getitem_finds_tensor_and_numpy_columns() -> None:
    batch = DataProto.from_dict({"ids": torch.arange(2)}, {"multi_modal_inputs": [{"pixels": torch.ones(2)}, {}]})
    assert batch["multi_modal_inputs"][0]["pixels"].tolist() == [1, 1]
    assert "multi_modal_inputs" in batch
