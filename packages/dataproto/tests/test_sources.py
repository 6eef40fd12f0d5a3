"""Batches made of rows, TensorDicts and Arrow tables."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tidemill_dataproto import DataProto, ragged

pyarrow = pytest.importorskip("pyarrow")


def test_rows_become_columns_by_what_they_hold() -> None:
    rows = [
        {"ids": torch.arange(3), "n": torch.tensor(1.5), "box": torch.zeros(2), "uid": "a", "k": 1},
        {"ids": torch.arange(0), "n": torch.tensor(2.5), "box": torch.ones(2), "uid": "b", "k": [2]},
    ]
    batch = DataProto.from_items(rows, dense=["box"])
    assert ragged.lengths(batch["ids"]).tolist() == [3, 0]
    assert batch["n"].tolist() == [1.5, 2.5]
    assert batch["box"].tolist() == [[0, 0], [1, 1]]
    assert batch["uid"].tolist() == ["a", "b"]
    assert batch["k"].tolist() == [1, [2]]
    assert not batch.meta_info
    equal = DataProto.from_items([{"ids": torch.arange(2)}, {"ids": torch.arange(2)}])
    assert equal["ids"].is_nested  # what a column is does not depend on its lengths


def test_items_are_views_with_facts_of_their_own() -> None:
    ids = ragged.ragged(torch.arange(3), [2, 1])
    batch = DataProto.from_dict({"ids": ids}, {"uid": ["a", "b"]}, {"list": []})
    item = batch[1]
    item.batch["ids"][0] = 9
    item.meta_info["list"].append(1)
    assert ragged.values(batch["ids"]).tolist() == [0, 1, 9]
    assert batch.meta_info == {"list": []}
    with pytest.raises(ValueError, match="the same meta_info"):
        DataProto.from_items([batch[0], item])


def test_tensordict_with_non_tensors() -> None:
    source = TensorDict({"x": torch.arange(2)}, [2])
    source["uid"] = NonTensorStack("a", "b")
    source["temperature"] = NonTensorData(0.5, batch_size=[2])
    batch = DataProto.from_tensordict(source, {"step": 1})
    assert batch["x"].tolist() == [0, 1]
    assert batch["uid"].tolist() == ["a", "b"]
    assert batch.meta_info == {"step": 1, "temperature": 0.5}
    batch.batch["y"] = torch.zeros(2)
    assert "y" not in source.keys()  # noqa: SIM118 - a TensorDict
    with pytest.raises(ValueError, match="'temperature' is NonTensorData"):
        DataProto.from_tensordict(source, {"temperature": 1})
    with pytest.raises(TypeError, match=r"batch_size \[2, 1\]"):
        DataProto.from_tensordict(TensorDict({}, [2, 1]))


@pytest.fixture
def table() -> "pyarrow.Table":
    return pyarrow.table(
        {
            "id": pyarrow.array([1, 2, 3], pyarrow.int32()),
            "score": [0.5, 1.5, 2.5],
            "flag": [True, False, True],
            "tokens": [[1, 2], [], [3]],
            "bits": [[True], [False, True], []],
            "position_ids": pyarrow.array(
                [[[0, 0, 0], [1, 1, 1]], [[0, 0, 0]], []], pyarrow.list_(pyarrow.list_(pyarrow.int64(), 3))
            ),
            "uneven": [[[1], [2, 3]], [[4]], []],
            "box": pyarrow.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pyarrow.list_(pyarrow.float64(), 2)),
            "text": ["a", "b", "c"],
            "gaps": [1, None, 3],
            "ragged_gaps": [[1], None, [2]],
            "inner_gaps": [[1], [2, None], [None]],
            "info": [{"k": 1}, {"k": 2}, {"k": 3}],
        }
    )


def check_table(batch: DataProto, rows: list[int]) -> None:
    assert len(batch) == len(rows)
    tensors = {"id": torch.int32, "score": torch.float64, "flag": torch.bool, "tokens": torch.int64, "bits": torch.bool,
               "position_ids": torch.int64, "box": torch.float64}  # fmt: skip
    assert {name: column.dtype for name, column in batch.batch.items()} == tensors
    assert batch["id"].tolist() == [rows_id + 1 for rows_id in rows]
    assert ragged.lengths(batch["tokens"]).tolist() == [[2, 0, 1][row] for row in rows]
    assert [row.tolist() for row in batch["tokens"].unbind()] == [[[1, 2], [], [3]][row] for row in rows]
    assert [row.tolist() for row in batch["bits"].unbind()] == [[[True], [False, True], []][row] for row in rows]
    assert ragged.values(batch["position_ids"]).shape[1:] == (3,)
    assert batch["box"].tolist() == [[[1, 2], [3, 4], [5, 6]][row] for row in rows]
    assert batch["text"].tolist() == [["a", "b", "c"][row] for row in rows]
    assert batch["gaps"].tolist() == [[1, None, 3][row] for row in rows]
    assert batch["ragged_gaps"].tolist() == [[[1], None, [2]][row] for row in rows]
    assert batch["inner_gaps"].tolist() == [[[1], [2, None], [None]][row] for row in rows]
    assert batch["uneven"].tolist() == [[[[1], [2, 3]], [[4]], []][row] for row in rows]
    assert batch["info"].tolist() == [[{"k": 1}, {"k": 2}, {"k": 3}][row] for row in rows]
    batch["score"].zero_()  # tensors are the batch's own


def test_arrow_tables_whole_and_cut(table: "pyarrow.Table") -> None:
    check_table(DataProto.from_arrow(table), [0, 1, 2])
    check_table(DataProto.from_arrow(table.slice(1)), [1, 2])
    check_table(DataProto.from_arrow(pyarrow.concat_tables([table, table.slice(2)])), [0, 1, 2, 2])
    assert DataProto.from_arrow(table, {"step": 1}).meta_info == {"step": 1}
    assert table["score"].to_pylist() == [0.5, 1.5, 2.5]
    empty = DataProto.from_arrow(table.select(["id", "tokens", "text"]).slice(3))
    assert len(empty) == 0
    assert empty["tokens"].is_nested


def test_unsigned_integers_become_columns_with_row_operations() -> None:
    small, large = [0, 2**16 - 1, 3], [0, 2**64 - 1, 3]
    table = pyarrow.table(
        {
            "u8": pyarrow.array([1, 255, 3], pyarrow.uint8()),
            "u16": pyarrow.array(small, pyarrow.uint16()),
            "u32": pyarrow.array([0, 2**32 - 1, 3], pyarrow.uint32()),
            "u64": pyarrow.array([0, 2**63 - 1, 3], pyarrow.uint64()),
            "tokens": pyarrow.array([[1, 2**16 - 1], [], [3]], pyarrow.list_(pyarrow.uint16())),
            "large": pyarrow.array(large, pyarrow.uint64()),
            "many_large": pyarrow.array([large, [], large], pyarrow.list_(pyarrow.uint64())),
        }
    )
    batch = DataProto.from_arrow(table)
    dtypes = {"u8": torch.uint8, "u16": torch.int32, "u32": torch.int64, "u64": torch.int64, "tokens": torch.int32}
    assert {name: column.dtype for name, column in batch.batch.items()} == dtypes
    rows = [batch[[2, 1, 0]], batch.reorder([2, 1, 0]), next(batch[::-1].make_iterator(3, shuffle=False))]
    for reversed_rows in [*rows, batch.repeat(2, interleave=False)[[5, 1, 0]]]:
        for name in ("u8", "u16", "u32", "u64", "large", "many_large"):
            assert reversed_rows[name].tolist() == table[name].to_pylist()[::-1]
        assert ragged.values(reversed_rows["tokens"]).tolist() == [3, 1, 2**16 - 1]
    assert len(DataProto.from_arrow(table.slice(3))["u64"]) == 0


def test_parquet_files(table: "pyarrow.Table", tmp_path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    check_table(DataProto.from_parquet(tmp_path / "rows.parquet"), [0, 1, 2])
    assert list(DataProto.from_parquet(tmp_path / "rows.parquet", ["id"]).batch.keys()) == ["id"]
    assert DataProto.from_parquet(str(tmp_path / "rows.parquet"), ["text"])["text"].dtype == np.dtype(object)
    with pytest.raises(KeyError, match=r"no column 'none'; there are \['id', "):
        DataProto.from_parquet(tmp_path / "rows.parquet", ["none"])


def test_what_is_no_arrow_table_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a pyarrow.Table, got dict"):
        DataProto.from_arrow({"a": [1]})
