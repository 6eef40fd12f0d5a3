"""What DataProto promises beyond rows: isolation, atomicity, merging rules and errors."""

import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tidemill_dataproto import DataProto, ragged


def make(n: int = 4) -> DataProto:
    counts = [i % 3 for i in range(n)]
    ids = ragged.ragged(torch.arange(sum(counts)), counts)
    tensors = {"x": torch.arange(n), "ids": ids, "mask": ragged.like(torch.ones(sum(counts)), ids)}
    return DataProto.from_dict(tensors, {"uid": [f"u{i}" for i in range(n)]}, {"step": 1, "list": [1]})


# Construction


def test_from_single_dict_sorts_columns_by_kind() -> None:
    batch = DataProto.from_single_dict({"x": torch.zeros(2), "uid": ["a", "b"], "n": np.arange(2)}, {"k": 1})
    assert list(batch.batch.keys()) == ["x"]
    assert sorted(batch.non_tensor_batch) == ["n", "uid"]
    assert batch.meta_info == {"k": 1}


def test_construction_leaves_its_inputs_alone() -> None:
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
def test_object_columns_have_one_dimension_whatever_is_in_them(rows: list[Any]) -> None:
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


def test_no_columns_no_rows() -> None:
    batch = DataProto()
    assert len(batch) == 0
    assert [len(part) for part in batch.chunk(3)] == [0, 0, 0]
    assert len(DataProto.concat([batch, batch])) == 0
    assert len(batch.union(make())) == 4
    assert len(make().union(batch)) == 4


def test_rows_are_remembered_without_columns() -> None:
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
def test_nothing_shares_meta_info_or_columns_dicts(operation) -> None:
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
    with pytest.raises(KeyError, match=r"no non-tensor column 'none'; there are \['uid'\]"):
        batch.pop(["x"], ["none"])
    with pytest.raises(KeyError, match="no meta_info key 'none'"):
        batch.pop(["x"], meta_info_keys=["none"])
    assert sorted(batch._tensors()) == ["ids", "mask", "x"]
    assert "uid" in batch
    assert batch.pop()._tensors() == {}
    assert sorted(batch._tensors()) == ["ids", "mask", "x"]


def test_rename_in_either_half() -> None:
    batch = make().rename(["x", "uid"], ["y", "name"])
    assert sorted(batch._tensors()) == ["ids", "mask", "y"]
    assert list(batch.non_tensor_batch) == ["name"]
    swapped = make().rename(["ids", "mask"], ["mask", "ids"])
    assert swapped["mask"].dtype == torch.int64
    for old, new in ((["x"], ["ids"]), (["x", "ids"], ["a", "a"]), (["x"], ["uid"])):
        with pytest.raises(ValueError, match="one name"):
            make().rename(old, new)
    with pytest.raises(ValueError, match="as many"):
        make().rename(["x"], ["a", "b"])
    with pytest.raises(KeyError, match="no column 'none'"):
        make().rename("none", "a")


def test_union_checks_before_it_makes_anything() -> None:
    batch, other = make(), DataProto.from_dict({"new": torch.ones(4), "x": torch.zeros(4, dtype=torch.int64)})
    with pytest.raises(ValueError, match="column 'x' is in both"):
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


# Concatenation


def test_concat_names_columns_that_only_some_parts_have() -> None:
    first, second = make(), make().rename("x", "y")
    for parts in ([first, second], [second, first]):
        with pytest.raises(ValueError, match=r"part 1 lacks \['[xy]'\] of part 0 and has \['[xy]'\]"):
            DataProto.concat(parts)
    with pytest.raises(ValueError, match="'uid'"):
        DataProto.concat([first, first.select(None, [])])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2), torch.zeros(2, 3)),
        (torch.zeros(2, 3), torch.zeros(2, 4)),
        (torch.zeros(2), torch.zeros(2, device="meta")),
        (torch.zeros(2, 3), ragged.ragged(torch.zeros(3), [1, 2])),
        (ragged.ragged(torch.zeros(3, 2), [1, 2]), ragged.ragged(torch.zeros(3, 3), [1, 2])),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (np.zeros(2), np.zeros((2, 2))),
        (["a", "b"], np.array(["a", "b"])),
    ],
)
def test_concat_names_the_column_that_does_not_fit(a: Any, b: Any) -> None:
    with pytest.raises(ValueError, match=r"column 'c' is .* in part 1, but .* in part 0"):
        DataProto.concat([DataProto.from_single_dict({"c": a}), DataProto.from_single_dict({"c": b})])


def test_concat_joins_strings_of_different_widths() -> None:
    parts = [DataProto.from_dict(non_tensors={"s": np.array(strings)}) for strings in (["a"], ["long"])]
    assert DataProto.concat(parts)["s"].tolist() == ["a", "long"]


def test_concat_merges_meta_info_by_rule() -> None:
    parts = make().chunk(2)
    parts[0].meta_info.update(metrics={"time": 0.1}, only_first=torch.tensor([float("nan")]))
    parts[1].meta_info.update(metrics=[{"time": 0.2}], only_second=np.zeros(2))
    meta = DataProto.concat(parts).meta_info
    assert meta["metrics"] == [{"time": 0.1}, {"time": 0.2}]
    assert set(meta) == {"step", "list", "metrics", "only_first", "only_second"}
    assert parts[1].meta_info["metrics"] == [{"time": 0.2}]
    parts[1].meta_info["step"] = 2
    with pytest.raises(ValueError, match=r"meta_info\['step'\] is 1 in part 0, but 2 in part 1; .*metrics"):
        DataProto.concat(parts)


def test_concat_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one part"):
        DataProto.concat([])


# Wire


def test_out_of_band_pickle_copies_nothing() -> None:
    batch = make()
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    new = pickle.loads(data, buffers=buffers)
    assert len(data) < 1000
    for name in ("x", "ids", "mask"):
        old_flat, new_flat = (c.values() if c.is_nested else c for c in (batch[name], new[name]))
        assert old_flat.data_ptr() == new_flat.data_ptr()
    assert len(buffers) == 4  # x, ids, mask, and once the offsets of both


def test_a_chunk_pickles_its_own_bytes_only() -> None:
    whole = DataProto.from_dict({"x": torch.zeros(1000, 100), "ids": ragged.ragged(torch.zeros(100_000), [100] * 1000)})
    assert len(pickle.dumps(whole.chunk(100)[5], 5)) < 2 * 4000 + 1000


def test_tensors_that_are_not_contiguous_or_need_gradients_pickle() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    batch = DataProto.from_dict({"t": base.t(), "e": torch.ones(1).expand(4), "g": torch.ones(4, requires_grad=True)})
    for protocol in (4, 5):
        new = pickle.loads(pickle.dumps(batch, protocol))
        assert new["t"].tolist() == base.t().tolist()
        assert new["e"].tolist() == [1.0] * 4
        assert not new["g"].requires_grad
        new["t"].zero_()
    assert base.sum() == 66


def test_unpickled_in_band_is_writable_and_can_be_trained_on() -> None:
    new = pickle.loads(pickle.dumps(make(), 5))
    new["x"].add_(1)
    weight = torch.ones((), requires_grad=True)
    (ragged.values(new["mask"]) * weight).sum().backward()
    assert weight.grad == ragged.values(new["mask"]).sum()


def _child(queue: Any) -> None:
    queue.put(make())


def test_through_a_process_queue() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_child, args=(queue,))
    process.start()
    new = queue.get(timeout=60)
    process.join()
    assert new["ids"].values().tolist() == make()["ids"].values().tolist()
    assert new["uid"].tolist() == make()["uid"].tolist()


def test_to_moves_every_half_of_a_ragged_column() -> None:
    moved = make().to("meta")
    assert {name: str(c.device) for name, c in moved._tensors().items()} == dict.fromkeys(["x", "ids", "mask"], "meta")
    assert moved["ids"].offsets().device.type == "meta"
    assert moved["ids"].offsets() is moved["mask"].offsets()


def test_row_operations_in_inference_mode() -> None:
    batch = make()
    with torch.inference_mode():
        parts = [batch[1:], batch[[0, 2]], *batch.chunk(2), DataProto.concat([batch, batch]), batch.clone()]
        parts.append(pickle.loads(pickle.dumps(batch)))
    assert [len(part) for part in parts] == [3, 2, 2, 2, 8, 4, 4]


# Errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}), ValueError, "{'a': 2, 'b': 3}"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"b": [1]}), ValueError, "{'a': 2, 'b': 1}"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"a": [1, 2]}), ValueError, "'a'.* both halves"),
        (lambda: DataProto.from_dict({"a": torch.tensor(1)}), ValueError, "'a'.*0 dims"),
        (lambda: DataProto.from_dict({"a": [1]}), TypeError, "'a': expected a tensor, got list"),
        (lambda: DataProto.from_dict({1: torch.zeros(2)}), TypeError, "column name as a string"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2).to_sparse()}), ValueError, "'a'.*sparse"),
        (lambda: DataProto.from_dict(non_tensors={"a": "text"}), TypeError, "'a'.*got str"),
        (lambda: DataProto.from_dict(non_tensors={"a": np.array(1)}), TypeError, "'a'"),
        (lambda: DataProto(non_tensor_batch={"a": [1]}), TypeError, "'a': expected a numpy array"),
        (lambda: DataProto(non_tensor_batch={"a": np.empty((2, 2), object)}), ValueError, r"'a'.*object \[2, 2\]"),
        (lambda: DataProto(TensorDict({}, batch_size=[2, 2])), ValueError, r"batch_size \[B\], got \[2, 2\]"),
        (lambda: DataProto(TensorDict({"a": TensorDict({}, [2])}, [2])), TypeError, "'a'.*got TensorDict"),
        (lambda: make()[1], TypeError, r"got the int 1; use \[1:2\]"),
        (lambda: make()["none"], KeyError, r"no column 'none'; there are \['x', 'ids', 'mask', 'uid'\]"),
        (lambda: make()[[4]], IndexError, "row 4 is out of range for a batch of 4"),
        (lambda: make()[[0, -5]], IndexError, "row -5"),
        (lambda: DataProto()[[0]], IndexError, "row 0 is out of range for a batch of 0"),
        (lambda: make()[[0.5]], TypeError, "float64"),
        (lambda: make()[torch.zeros(2)], TypeError, "float32"),
        (lambda: make()[["x"]], TypeError, "integers or a bool mask"),
        (lambda: make()[torch.zeros(1, 1, dtype=torch.int64)], ValueError, "one dimension"),
        (lambda: make()[[True, False]], ValueError, "mask of 4 rows"),
        (lambda: make()[None], TypeError, "NoneType"),
        (lambda: list(make()), TypeError, "not iterable"),
        (lambda: make().reorder([0, 1, 2]), ValueError, "permutation of 4 rows"),
        (lambda: make().reorder([0, 1, 2, 2]), ValueError, "permutation"),
        (lambda: make().repeat(-1), ValueError, "times >= 0"),
        (lambda: make().chunk(0), ValueError, "at least one chunk"),
        (lambda: make().chunk(3), ValueError, "4 rows do not divide into 3"),
        (lambda: make().chunk(8), ValueError, "4 rows do not divide into 8"),
        (lambda: make().split(0), ValueError, "at least one row"),
        (lambda: make().make_iterator(0), ValueError, "mini_batch_size >= 1"),
        (lambda: make().make_iterator(1, epochs=-1), ValueError, "epochs >= 0"),
        (lambda: make().select("x"), TypeError, r"write \['x'\]"),
        (lambda: make().select(["none"]), KeyError, "no tensor column 'none'"),
        (lambda: make().select(meta_info_keys=["none"]), KeyError, "no meta_info key 'none'"),
    ],
)
def test_errors_say_what_came(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_bad_column_put_in_by_hand_is_named_by_the_next_operation() -> None:
    batch = make()
    batch.non_tensor_batch["late"] = np.zeros(3)
    for call in (lambda: batch.chunk(2), lambda: batch[[0]], lambda: pickle.dumps(batch), lambda: batch.to("cpu")):
        with pytest.raises(ValueError, match="'late': 3"):
            call()
    batch = make()
    batch.batch["text"] = "abc"
    with pytest.raises(TypeError, match="column 'text': expected a tensor"):
        batch.chunk(2)
    shifted = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([2, 4, 9]))
    with pytest.raises(ValueError, match="column 'c': expected offsets from 0"):
        DataProto.from_dict({"c": shifted})
