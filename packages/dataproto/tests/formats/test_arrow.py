"""Batches from Arrow tables and parquet files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tidemill_dataproto import DataProto, ragged

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")


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
    batch["score"].zero_()  # the batch owns its tensors


def test_arrow_table_whole_sliced_and_chunked(table: "pyarrow.Table") -> None:
    check_table(DataProto.from_arrow(table), [0, 1, 2])
    check_table(DataProto.from_arrow(table.slice(1)), [1, 2])
    check_table(DataProto.from_arrow(pyarrow.concat_tables([table, table.slice(2)])), [0, 1, 2, 2])
    assert DataProto.from_arrow(table, {"step": 1}).meta_info == {"step": 1}
    assert table["score"].to_pylist() == [0.5, 1.5, 2.5]
    empty = DataProto.from_arrow(table.select(["id", "tokens", "text"]).slice(3))
    assert len(empty) == 0
    assert empty["tokens"].is_nested


def test_unsigned_integers_become_signed_columns_or_objects() -> None:
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


def write(table: "pyarrow.Table", path: Path, row_group_size: int = 2) -> Path:
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def test_parquet_file(table: "pyarrow.Table", tmp_path: Path) -> None:
    path = write(table, tmp_path / "rows.parquet")
    check_table(DataProto.from_parquet(path), [0, 1, 2])
    assert list(DataProto.from_parquet(path, ["id"]).batch.keys()) == ["id"]
    assert DataProto.from_parquet(str(path), ["text"])["text"].dtype == np.dtype(object)


def chat_table(num_rows: int) -> "pyarrow.Table":
    return pyarrow.table(
        {
            "prompt": [
                [{"role": "system", "content": "s"}] * (row % 2) + [{"role": "user", "content": f"{row}?"}]
                for row in range(num_rows)
            ],
            "ground_truth": pyarrow.array(range(num_rows), pyarrow.int64()),
            "reward_model": [{"ground_truth": str(row), "style": "rule"} for row in range(num_rows)],
            "scores": [[0.5] * (row % 3) for row in range(num_rows)],
        }
    )


def test_parquet_as_objects_has_the_python_values_of_the_rows(tmp_path: Path) -> None:
    table = chat_table(5)
    batch = DataProto.from_parquet(write(table, tmp_path / "rows.parquet"), as_objects=True)
    assert not batch.batch.keys()
    assert [item.non_tensor_batch for item in batch] == table.to_pylist()
    assert type(batch["ground_truth"][1]) is int
    assert DataProto.from_arrow(table, as_objects=True) == batch
    typed = DataProto.from_parquet(tmp_path / "rows.parquet")
    assert sorted(typed.batch.keys()) == ["ground_truth", "scores"]
    assert typed["prompt"].tolist() == table["prompt"].to_pylist()


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_iter_parquet_yields_all_rows_in_file_order(tmp_path: Path, batch_size: int, as_objects: bool) -> None:
    path = write(chat_table(10), tmp_path / "rows.parquet", row_group_size=4)
    parts = list(DataProto.iter_parquet(path, batch_size=batch_size, as_objects=as_objects))
    assert [len(part) for part in parts[:-1]] == [batch_size] * (len(parts) - 1)
    assert DataProto.concat(parts) == DataProto.from_parquet(path, as_objects=as_objects)
    columns = ["scores", "prompt"]
    parts = list(DataProto.iter_parquet(path, columns, batch_size=batch_size, as_objects=as_objects))
    assert DataProto.concat(parts) == DataProto.from_parquet(path, columns, as_objects=as_objects)


def test_iter_parquet_of_zero_rows_yields_nothing(tmp_path: Path) -> None:
    path = write(chat_table(3).slice(3), tmp_path / "rows.parquet")
    assert list(DataProto.iter_parquet(path)) == []
    assert len(DataProto.from_parquet(path)) == 0


def test_iter_parquet_refuses_column_with_nulls_in_some_batches(tmp_path: Path) -> None:
    path = write(pyarrow.table({"n": [1, 2, 3, None]}), tmp_path / "rows.parquet")
    parts = DataProto.iter_parquet(path, batch_size=2)
    assert next(parts)["n"].tolist() == [1, 2]
    with pytest.raises(
        ValueError, match=r"rows.parquet: columns \['n'\] have nulls.* \(seen in rows 2 to 3\).*as_objects"
    ):
        next(parts)
    assert [p["n"].tolist() for p in DataProto.iter_parquet(path, batch_size=2, as_objects=True)] == [[1, 2], [3, None]]


@pytest.mark.parametrize("read", [DataProto.from_parquet, DataProto.iter_parquet])
def test_parquet_errors_name_the_file(tmp_path: Path, read: Any) -> None:
    path = write(chat_table(100), tmp_path / "rows.parquet")
    with pytest.raises(KeyError, match=r"no column 'none'; known: \['prompt', "):
        read(path, ["none"])
    with pytest.raises(FileNotFoundError, match=r"no.parquet does not exist or is a folder"):
        read(tmp_path / "no.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"rows.parquet cannot be read as parquet: .*; check that the file"):
        read(path)


def test_parquet_file_damaged_inside_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = write(chat_table(100), tmp_path / "rows.parquet", row_group_size=100)
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * 200 + data[204:])
    for read in (DataProto.from_parquet, lambda path: list(DataProto.iter_parquet(path))):
        with pytest.raises(ValueError, match=r"rows.parquet cannot be read as parquet"):
            read(path)


def test_iter_parquet_checks_batch_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected batch_size >= 1, got 0"):
        DataProto.iter_parquet(tmp_path / "rows.parquet", batch_size=0)


def test_from_arrow_refuses_other_types() -> None:
    with pytest.raises(TypeError, match=r"expected a pyarrow.Table, got dict"):
        DataProto.from_arrow({"a": [1]})
