"""Concatenation: matching, missing and different columns, and merging of meta_info."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import make
from tidemill_dataproto import DataProto, ragged


def test_concat_names_columns_that_some_parts_lack() -> None:
    first, second = make(), make().rename("x", "y")
    for parts in ([first, second], [second, first]):
        with pytest.raises(ValueError, match=r"all 2 parts, but '[xy]' is missing from part \d; '[xy]' is missing"):
            DataProto.concat(parts)
    with pytest.raises(ValueError, match="'uid' is missing from part 1"):
        DataProto.concat([first, first.select(None, [])])
    with pytest.raises(ValueError, match=r"from part 1, 2, 3, 4, 5, 6, 7, 8 and 2 more"):
        DataProto.concat([first, *[first.select(None, [])] * 10])


def test_concat_fills_missing_columns() -> None:
    first, second = make(3), make(2).select(["x"], [])
    fill = {"ids": None, "mask": None, "uid": "none"}
    joined = DataProto.concat([second, first, second], fill=fill)
    assert joined["x"].tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert ragged.lengths(joined["ids"]).tolist() == [0, 0, *ragged.lengths(first["ids"]).tolist(), 0, 0]
    assert ragged.values(joined["ids"]).tolist() == ragged.values(first["ids"]).tolist()
    assert joined["uid"].tolist() == ["none", "none", "u0", "u1", "u2", "none", "none"]
    dense = DataProto.from_dict({"x": torch.ones(1, dtype=torch.int64), "d": torch.ones(1, 2)}, {"s": np.array(["ab"])})
    joined = DataProto.concat([make(1).select(["x"], []), dense], fill={"d": -1.5, "s": "longer"})
    assert joined["d"].tolist() == [[-1.5, -1.5], [1.0, 1.0]]
    assert joined["s"].tolist() == ["longer", "ab"]
    lists = DataProto.concat([make(2).select(["x"], []), make(1)], fill={"ids": None, "mask": None, "uid": []})
    assert lists["uid"][0] is not lists["uid"][1]
    for wrong, message in (
        ({"none": 1}, "columns of at least one part"),
        ({**fill, "ids": 0}, "'ids' is ragged .* empty rows"),
    ):
        with pytest.raises(ValueError, match=message):
            DataProto.concat([second, first], fill=wrong)
    with pytest.raises(ValueError, match="'uid' is missing"):
        DataProto.concat([second, first], fill={"ids": None, "mask": None})


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (torch.zeros(2, dtype=torch.int64), 0.7),
        (torch.zeros(2, dtype=torch.int64), float("nan")),
        (torch.zeros(2, dtype=torch.uint8), -1),
        (torch.zeros(2, dtype=torch.int64), 2**63),
        (torch.zeros(2, dtype=torch.bool), 7),
        (torch.zeros(2, dtype=torch.float16), 1e6),
        pytest.param(torch.zeros(2), 10**400, id="10**400"),
        (torch.zeros(2), None),
        (torch.zeros(2), "1"),
        (torch.zeros(2, 2), [1, 2]),
        (np.zeros(2, dtype=np.int64), 0.7),
        (np.zeros(2, dtype=np.uint8), 256),
        (np.zeros(2, dtype=bool), 7),
        (np.zeros(2, dtype=np.float32), 1e300),
        (np.zeros(2), None),
        (np.zeros(2), "1"),
        (np.zeros(2, dtype="datetime64[s]"), 5),
    ],
)
def test_fill_that_the_dtype_cannot_represent_is_refused(column: Any, value: Any) -> None:
    full = DataProto.from_single_dict({"x": torch.zeros(2), "c": column})
    for parts in ([full, full.select(["x"], [])], [full.select(["x"], [])[:0], full]):  # also without rows to fill
        with pytest.raises(ValueError, match=r"column 'c' is .*, which cannot hold"):
            DataProto.concat(parts, fill={"c": value})
    assert DataProto.concat([full, full], fill={"c": value}) == full.repeat(2)  # no part needs it


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (torch.zeros(2, dtype=torch.int64), 7.0),
        (torch.zeros(2, dtype=torch.int64), np.int8(-3)),
        (torch.zeros(2, dtype=torch.bool), 1),
        (torch.zeros(2, dtype=torch.bool), np.True_),
        (torch.zeros(2, dtype=torch.bfloat16), 0.1),
        (torch.zeros(2, dtype=torch.float16), -float("inf")),
        (torch.zeros(2, dtype=torch.complex64), 1j),
        (np.zeros(2, dtype=np.float32), 0.1),
        (np.zeros(2, dtype=np.float32), float("nan")),
        (np.zeros(2, dtype=np.uint64), 2**64 - 1),
        (np.zeros(2, dtype="datetime64[s]"), np.datetime64("2026-01-01")),
    ],
)
def test_fill_that_the_dtype_can_represent_is_kept(column: Any, value: Any) -> None:
    full = DataProto.from_single_dict({"x": torch.zeros(2), "c": column})
    joined = DataProto.concat([full, full.select(["x"], [])], fill={"c": value})["c"]
    assert joined.dtype == column.dtype
    assert joined[2:].tolist() == pytest.approx([value] * 2, rel=0.01, nan_ok=True) or joined[2] == value


def test_fill_may_be_one_row_of_a_numpy_column() -> None:
    full = DataProto.from_dict({"x": torch.zeros(1)}, {"c": np.zeros((1, 2), dtype=np.int64)})
    joined = DataProto.concat([full, full.select(["x"], [])], fill={"c": np.array([1, 2])})
    assert joined["c"].tolist() == [[0, 0], [1, 2]]
    with pytest.raises(ValueError, match=r"cannot hold 2\.5"):
        DataProto.concat([full, full.select(["x"], [])], fill={"c": [1, 2.5]})


def test_concat_names_column_that_is_tensor_and_numpy() -> None:
    x = torch.zeros(2)
    tensor, array = (DataProto.from_single_dict({"x": x, "y": y}) for y in (torch.zeros(2), np.zeros(2)))
    without = DataProto.from_dict({"x": x})
    with pytest.raises(ValueError, match=r"column 'y' is a numpy array in part 2, but a tensor in part 1; convert one"):
        DataProto.concat([tensor, tensor, array])
    with pytest.raises(ValueError, match=r"column 'y' is a tensor in part 2, but a numpy array in part 1"):
        DataProto.concat([without, array, tensor], fill={"y": 0})


def test_batch_without_columns_and_rows_concatenates_with_any() -> None:
    batch = make()
    assert DataProto.concat([DataProto(), batch, DataProto(meta_info={"other": 1})])["x"].tolist() == [0, 1, 2, 3]
    assert DataProto.concat([DataProto(), batch]) == batch == DataProto.concat([batch, DataProto()])


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
def test_concat_names_column_of_different_kinds(a: Any, b: Any) -> None:
    with pytest.raises(ValueError, match=r"column 'c' is .* in part 1, but .* in part 0"):
        DataProto.concat([DataProto.from_single_dict({"c": a}), DataProto.from_single_dict({"c": b})])


def test_concat_joins_strings_of_different_widths() -> None:
    parts = [DataProto.from_dict(non_tensors={"s": np.array(strings)}) for strings in (["a"], ["long"])]
    assert DataProto.concat(parts)["s"].tolist() == ["a", "long"]


def test_concat_merges_meta_info_by_rule() -> None:
    parts = make().chunk(2)
    parts[0].meta_info.update(metrics={"time": 0.1}, timing=0.1, only_first=torch.tensor([float("nan")]))
    parts[1].meta_info.update(metrics=[{"time": 0.2}], timing=0.2, only_second=np.zeros(2))
    meta = DataProto.concat(parts).meta_info
    assert meta["metrics"] == [{"time": 0.1}, {"time": 0.2}]
    assert meta["timing"] == [0.1, 0.2]
    assert set(meta) == {"step", "list", "metrics", "timing", "only_first", "only_second"}
    assert parts[1].meta_info["metrics"] == [{"time": 0.2}]
    parts[1].meta_info["step"] = 2
    with pytest.raises(ValueError, match=r"meta_info\['step'\] is 1 in part 0, but 2 in part 1; .*merge=\{'step'"):
        DataProto.concat(parts)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("first", {"a": 1, "b": 4}),
        ("list", [{"a": 1, "b": 4}, {"a": 5}]),
        ("sum", {"a": 6, "b": 4}),
        ("mean", {"a": 4, "b": 4}),  # of one row and of three
        ("max", {"a": 5, "b": 4}),
        ("min", {"a": 1, "b": 4}),
        (len, 2),
    ],
)
def test_merge_rules_of_meta_info(rule: Any, expected: Any) -> None:
    one = DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"key": {"a": 1, "b": 4}, "number": 2})
    three = DataProto.from_dict({"x": torch.zeros(3)}, meta_info={"key": {"a": 5}, "number": 2})
    joined = DataProto.concat([one, three], merge={"key": rule})
    assert joined.meta_info == {"key": expected, "number": 2}
    assert one.meta_info["key"] == {"a": 1, "b": 4}
    both = one.union(DataProto.from_dict({"y": torch.zeros(1)}, meta_info={"key": {"a": 1}}), merge={"key": "max"})
    assert both.meta_info["key"] == {"a": 1, "b": 4}


@pytest.mark.parametrize("value", [np.float32("nan"), np.datetime64("NaT"), np.array(["NaT"], "M8[s]")])
def test_nan_of_any_type_agrees_with_itself(value: Any) -> None:
    batch = DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"key": value})
    assert DataProto.concat(batch.chunk(2)) == batch


@pytest.mark.parametrize("rule", ["sum", "mean", "max", "min"])
def test_rules_for_numbers_keep_nan_in_any_order(rule: Any) -> None:
    parts = [DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"key": value}) for value in (1.0, math.nan, 2.0)]
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        assert math.isnan(DataProto.concat([parts[part] for part in order], merge={"key": rule}).meta_info["key"])


def test_rules_for_numbers_refuse_other_values() -> None:
    parts = [DataProto.from_dict({"x": torch.zeros(n)}, meta_info={"n": n, "s": str(n)}) for n in (1, 3)]
    assert DataProto.concat(parts, merge={"n": "mean", "s": "first"}).meta_info["n"] == 2.5
    empty = [DataProto.from_dict({"x": torch.zeros(0)}, meta_info={"n": 1})] * 2
    assert np.isnan(DataProto.concat(empty, merge={"n": "mean"}).meta_info["n"])
    with pytest.raises(TypeError, match=r"meta_info\['s'\]: expected numbers for the rule 'sum', got str"):
        DataProto.concat(parts, merge={"n": "sum", "s": "sum"})
    wrong: Any = "median"
    with pytest.raises(ValueError, match="unknown rule 'median'; known: same"):
        DataProto.concat(parts, merge={"n": wrong})


def test_concat_of_no_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one part"):
        DataProto.concat([])


def test_timings_and_metrics_may_differ_between_parts() -> None:
    parts = make().chunk(2)
    for part, seconds in zip(parts, (0.1, 0.1 + 1e-16), strict=True):
        part.meta_info["timing"] = {"generate": seconds}
        part.meta_info["metrics"] = {"loss": seconds}
    meta = DataProto.concat(parts).meta_info
    assert len(meta["timing"]) == len(meta["metrics"]) == 2
    assert DataProto.concat(parts, merge={"timing": "max"}).meta_info["timing"] == {"generate": 0.1 + 1e-16}
