"""Conversion between batches and TensorDicts with nested and non-tensor columns.

The TensorDict has batch_size [B]. Tensor columns are the same tensor objects, numpy columns are NonTensorStacks, and
every item of meta_info is NonTensorData. Two entries exist only where a batch needs them to be restored exactly:
`_dataproto_dtypes` (NonTensorData: dtype and row shape of numpy columns that do not hold objects) and
`_dataproto_padding` (bool `[B]`: the padding rows).
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from tidemill_dataproto.columns.numpy_columns import object_column
from tidemill_dataproto.columns.tensor_columns import Column, as_tensor

__all__ = ["DTYPES", "PADDING", "of_tensordict", "to_tensordict"]

DTYPES, PADDING = "_dataproto_dtypes", "_dataproto_padding"


def to_tensordict(
    num_rows: int,
    columns: Mapping[str, Column],
    arrays: Mapping[str, np.ndarray],
    meta_info: Mapping[str, Any],
    padding: np.ndarray | None,
) -> TensorDict:
    """See `DataProto.to_tensordict`."""
    entries: dict[str, Any] = {name: as_tensor(column) for name, column in columns.items()}
    dtypes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, array in arrays.items():
        rows: list[Any] = [NonTensorData(row) for row in array]
        entries[name] = NonTensorStack.from_list(rows)
        if array.dtype != object:
            dtypes[name] = array.dtype, array.shape[1:]
    meta = {**copy.deepcopy(dict(meta_info)), **({DTYPES: dtypes} if dtypes else {})}
    for key, value in meta.items():
        if not isinstance(key, str) or key in entries or (key == DTYPES and key in meta_info):
            raise ValueError(
                f"expected keys of meta_info that are strings and not names of columns, got {key!r}; rename the key or "
                f"drop it with select(meta_info_keys=...)"
            )
        entries[key] = NonTensorData(value, batch_size=[num_rows])
    if padding is not None:
        if PADDING in entries:
            raise ValueError(f"the name {PADDING!r} is reserved for the marks of padding rows; rename the column")
        entries[PADDING] = torch.from_numpy(padding.copy())
    return TensorDict(entries, batch_size=[num_rows])


def of_tensordict(
    data: Any, meta_info: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, np.ndarray], dict[str, Any], np.ndarray | None]:
    """Return tensor columns, numpy columns, meta_info and padding marks; see `DataProto.from_tensordict`."""
    if not isinstance(data, TensorDictBase) or data.batch_dims > 1:
        size = f" of batch_size {list(data.batch_size)}" if isinstance(data, TensorDictBase) else ""
        raise TypeError(
            f"expected a TensorDict with batch_size [B], got {type(data).__name__}{size}; set td.batch_size = [B], or "
            f"flatten the batch dims with td.reshape(-1)"
        )
    tensors: dict[str, Any] = {}  # `as_column` checks their types
    objects: dict[str, list[Any]] = {}
    meta = dict(meta_info)
    for name, value in data.items():
        if isinstance(value, NonTensorStack):
            objects[name] = value.tolist()
        elif isinstance(value, NonTensorData):
            if name in meta:
                raise ValueError(f"{name!r} is NonTensorData of the TensorDict and a key of meta_info; rename one")
            meta[name] = value.data
        else:
            tensors[name] = value
    if data.batch_dims == 0 and (tensors or objects):
        raise TypeError(
            f"expected a TensorDict with batch_size [B], got batch_size [] with the columns {[*tensors, *objects]}; "
            f"set td.batch_size = [B]"
        )
    dtypes: Mapping[str, tuple[np.dtype, tuple[int, ...]]] = meta.pop(DTYPES, {})
    padding = tensors.pop(PADDING).numpy(force=True).copy() if PADDING in tensors else None
    arrays = {name: _array_of(rows, dtypes.get(name)) for name, rows in objects.items()}
    return tensors, arrays, meta, padding


def _array_of(rows: list[Any], kind: tuple[np.dtype, tuple[int, ...]] | None) -> np.ndarray:
    if kind is None:
        return object_column(rows)
    dtype, shape = kind
    return np.array(rows, dtype=dtype).reshape(len(rows), *shape)
