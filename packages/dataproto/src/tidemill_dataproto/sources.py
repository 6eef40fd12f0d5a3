"""What a batch can be made of, as columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from tidemill_dataproto import ragged
from tidemill_dataproto.checks import check_known, pick
from tidemill_dataproto.equality import same
from tidemill_dataproto.items import DataProtoItem

__all__ = ["of_arrow", "of_items", "of_tensordict", "read_parquet"]

# torch can hold these unsigned integers, and neither choose nor repeat rows of them on the CPU.
_SIGNED = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
_Tensors = dict[str, Tensor]
_Others = dict[str, Any]


def of_items(
    items: Sequence[DataProtoItem | Mapping[str, Any]], dense: Sequence[str]
) -> tuple[_Tensors, _Others, dict[str, Any]]:
    """Tensor columns, other columns and facts of rows; see `DataProto.from_items`."""
    if len(items) == 0:
        raise ValueError("expected at least one item; make a batch of zero rows with from_dict()")
    rows = [{**item.batch, **item.non_tensor_batch} if isinstance(item, DataProtoItem) else item for item in items]
    metas = [item.meta_info for item in items if isinstance(item, DataProtoItem)]
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(f"expected the columns {list(rows[0])} of item 0, got {list(row)} in item {number}")
    for meta in metas:
        if not same(meta, metas[0]):
            raise ValueError(f"expected items with the same meta_info, got {metas[0]} and {meta}")
    pick(rows[0], dense, "column")
    tensors: _Tensors = {}
    others: _Others = {}
    for name in rows[0]:
        column = [row[name] for row in rows]
        are_tensors = [isinstance(value, Tensor) for value in column]
        if any(are_tensors) and not all(are_tensors):
            other = are_tensors.index(False)
            raise ValueError(f"column {name!r}: expected tensors in all items, item {other} has none")
        if all(are_tensors):
            tensors[name] = _column_of(name, column, name in dense)
        else:
            others[name] = column
    return tensors, others, metas[0] if metas else {}


def _column_of(name: str, rows: list[Tensor], is_dense: bool) -> Tensor:
    first = rows[0]
    if not is_dense and first.dim() > 0:
        try:
            return ragged.ragged_from_list(rows)
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from error
    for number, row in enumerate(rows):
        if (row.shape, row.dtype, row.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"column {name!r}: item {number} is {row.dtype} {[*row.shape]} on {row.device}, which does not go with "
                f"item 0, {first.dtype} {[*first.shape]} on {first.device}"
            )
    return torch.stack(rows)


def of_tensordict(data: Any, meta_info: Mapping[str, Any]) -> tuple[_Tensors, _Others, dict[str, Any]]:
    """Tensor columns, other columns and facts of a TensorDict; see `DataProto.from_tensordict`."""
    if not isinstance(data, TensorDictBase) or data.batch_dims != 1:
        size = f" of batch_size {list(data.batch_size)}" if isinstance(data, TensorDictBase) else ""
        raise TypeError(f"expected a TensorDict with batch_size [B], got {type(data).__name__}{size}")
    tensors: _Tensors = {}
    others: _Others = {}
    facts = dict(meta_info)
    for name in data.keys():  # noqa: SIM118 - a TensorDict
        value: Any = data._get_str(name, None)
        if isinstance(value, NonTensorStack):
            others[name] = value.tolist()
        elif isinstance(value, NonTensorData):
            if name in facts:
                raise ValueError(f"{name!r} is NonTensorData of the TensorDict and in meta_info; rename one of them")
            facts[name] = value.data
        else:
            tensors[name] = value
    return tensors, others, facts


def read_parquet(path: str | Path, columns: Sequence[str] | None) -> Any:
    """A parquet file as an Arrow table."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("reading parquet needs pyarrow: pip install 'tidemill-dataproto[arrow]'") from error
    if columns is not None:
        check_known("column", columns, pyarrow.parquet.read_schema(path).names)
    return pyarrow.parquet.read_table(path, columns=None if columns is None else list(columns))


def of_arrow(table: Any) -> tuple[_Tensors, _Others]:
    """Tensor columns and other columns of an Arrow table; see `DataProto.from_arrow`."""
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("an Arrow table needs pyarrow: pip install 'tidemill-dataproto[arrow]'") from error
    if not isinstance(table, pyarrow.Table):
        raise TypeError(f"expected a pyarrow.Table, got {type(table).__name__}; see DataProto.from_single_dict")
    tensors: _Tensors = {}
    others: _Others = {}
    for name, chunks in zip(table.column_names, table.columns, strict=True):
        array = chunks.combine_chunks()
        tensor = _tensor_of(array)
        if tensor is None:
            others[name] = array.to_pylist()
        else:
            tensors[name] = tensor
    return tensors, others


def _tensor_of(array: Any) -> Tensor | None:
    """The numbers of an Arrow array, or of lists of numbers, if there are no nulls and int64 holds them."""
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
    if inner is None or inner.is_nested:  # lists of lists: whether all are equally long is chance
        return None
    return ragged.ragged(inner, array.value_lengths().to_numpy().astype(np.int64))
