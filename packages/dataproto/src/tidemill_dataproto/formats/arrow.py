"""Conversion of Arrow tables and parquet files to columns. pyarrow is imported only when a function is called."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill_dataproto import ragged
from tidemill_dataproto.columns.checks import check_known

__all__ = ["columns_of_table", "iter_parquet", "read_parquet"]

# torch has these unsigned dtypes but cannot index or repeat their rows on the CPU.
_SIGNED = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
_INSTALL = "pip install 'tidemill-dataproto[arrow]'"
_Table = tuple[dict[str, Tensor], dict[str, Any]]


def read_parquet(path: str | Path, columns: Sequence[str] | None) -> Any:
    """Read a parquet file as an Arrow table, its rows in file order; see `DataProto.from_parquet`."""
    with _open(path, columns) as file, _named_errors(path):
        return file.read(columns=None if columns is None else list(columns))


def iter_parquet(
    path: str | Path, columns: Sequence[str] | None, batch_size: int, as_objects: bool
) -> Iterator[_Table]:
    """Yield tensor columns and object columns of `batch_size` rows each; see `DataProto.iter_parquet`."""
    if batch_size < 1:
        raise ValueError(f"expected batch_size >= 1, got {batch_size}")
    return _iter_open(_open(path, columns), path, columns, batch_size, as_objects)


def _iter_open(
    file: Any, path: str | Path, columns: Sequence[str] | None, batch_size: int, as_objects: bool
) -> Iterator[_Table]:
    import pyarrow

    first_tensors: set[str] | None = None
    start = 0
    with file:
        batches = file.iter_batches(batch_size, columns=None if columns is None else list(columns))
        while True:
            with _named_errors(path):
                batch = next(batches, None)
            if batch is None:
                return
            tensors, objects = columns_of_table(pyarrow.Table.from_batches([batch]), as_objects)
            first_tensors = set(tensors) if first_tensors is None else first_tensors
            changed = sorted(first_tensors ^ set(tensors))
            if changed:
                raise ValueError(
                    f"{path}: columns {changed} have nulls or values above int64 in some batches only (seen in rows "
                    f"{start} to {start + batch.num_rows - 1}), so they are tensors in some and objects in others; "
                    f"pass as_objects=True"
                )
            start += batch.num_rows
            yield tensors, objects


def _open(path: str | Path, columns: Sequence[str] | None) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"reading parquet requires pyarrow; install it with {_INSTALL}") from error
    if not Path(path).is_file():
        raise FileNotFoundError(f"expected a parquet file, but {Path(path).absolute()} does not exist or is a folder")
    with _named_errors(path):
        file = pyarrow.parquet.ParquetFile(path)
    if columns is not None:
        check_known("column", columns, file.schema_arrow.names)
    return file


@contextmanager
def _named_errors(path: str | Path) -> Iterator[None]:
    """Raise errors of pyarrow as ValueError with the path."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}; check that the file is complete") from error


def columns_of_table(table: Any, as_objects: bool) -> _Table:
    """Convert an Arrow table to tensor columns and object columns; see `DataProto.from_arrow`."""
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f"from_arrow requires pyarrow; install it with {_INSTALL}") from error
    if not isinstance(table, pyarrow.Table):
        raise TypeError(
            f"expected a pyarrow.Table, got {type(table).__name__}; use DataProto.from_single_dict for a dict"
        )
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}
    for name, chunks in zip(table.column_names, table.columns, strict=True):
        array = chunks.combine_chunks()
        tensor = None if as_objects else _tensor_of(array)
        if tensor is None:
            objects[name] = array.to_pylist()
        else:
            tensors[name] = tensor
    return tensors, objects


def _tensor_of(array: Any) -> Tensor | None:
    """Return numbers, or lists of numbers, as a tensor; None if there are nulls or values above int64."""
    import pyarrow.types as types

    kind = array.type
    if array.null_count > 0:
        return None
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        numbers = array.to_numpy(zero_copy_only=False)
        if numbers.dtype == np.uint64 and numbers.max(initial=0) > np.iinfo(np.int64).max:
            return None
        return torch.from_numpy(numbers.astype(_SIGNED.get(numbers.dtype.name, numbers.dtype)))
    if types.is_fixed_size_list(kind):
        inner = _tensor_of(array.flatten())
        return None if inner is None or inner.is_nested else inner.unflatten(0, (len(array), kind.list_size))
    if not (types.is_list(kind) or types.is_large_list(kind)):
        return None
    inner = _tensor_of(array.flatten())
    if inner is None or inner.is_nested:  # a list of lists is an object, even if all inner lists are equally long
        return None
    return ragged.ragged(inner, array.value_lengths().to_numpy().astype(np.int64))
