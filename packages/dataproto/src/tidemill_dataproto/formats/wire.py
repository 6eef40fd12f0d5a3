"""Pickle tensor columns as buffers, which pickle protocol 5 can pass on without a copy."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill_dataproto.columns.tensor_columns import Column
from tidemill_dataproto.formats import pieces
from tidemill_dataproto.ragged.layout import JaggedColumn, Layout

__all__ = ["Packed", "as_bytes", "from_bytes", "pack", "unpack"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as its dtype, its shape and its bytes: in one buffer, or in consecutive pieces."""

    dtype: str
    shape: tuple[int, ...]
    data: list[Any]


@dataclass(frozen=True, slots=True)
class Packed:
    """Columns by name, ragged ones with the number of their layout, and the bounds of these layouts."""

    layouts: list[np.ndarray]
    columns: dict[str, tuple[PackedTensor, int | None]]


def pack(columns: Mapping[str, Column], protocol: int) -> Packed:
    """Pack columns for `unpack`.

    CPU tensors are not copied, unless they are not contiguous or `protocol` is below 5; others are copied to the CPU,
    which waits for their device. A slice of a larger tensor packs only its own bytes. Gradients are not packed.
    """
    layouts: list[np.ndarray] = []
    numbers: dict[int, int] = {}
    packed: dict[str, tuple[PackedTensor, int | None]] = {}
    for name, column in columns.items():
        if isinstance(column, JaggedColumn):
            key = column.layout.key
            if key not in numbers:
                numbers[key] = len(layouts)
                layouts.append(column.layout.bounds)
            packed[name] = _pack(column.values, protocol), numbers[key]
        else:
            packed[name] = _pack(column, protocol), None
    return Packed(layouts, packed)


def unpack(packed: Packed) -> dict[str, Column]:
    """Rebuild the columns on the CPU, as views of the buffers."""
    # Copies of these few bytes do not keep the buffers alive, and are writable, as torch expects.
    layouts = [Layout(bounds.copy(), _CPU) for bounds in packed.layouts]
    columns: dict[str, Column] = {}
    with warnings.catch_warnings():  # buffers in an object store are read-only, as documented in DataProto
        warnings.filterwarnings("ignore", message="The given .* is not writable")
        for name, (tensor, number) in packed.columns.items():
            values = from_bytes(pieces.join(tensor.data), tensor.dtype, tensor.shape)
            columns[name] = values if number is None else JaggedColumn(values, layouts[number])
    return columns


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor, on its device, as uint8 `[num_bytes]`; a copy if they are not contiguous."""
    if tensor.numel() == 0:  # an empty one from numpy may have a stride of 0, which cannot be viewed as bytes
        return tensor.new_empty(0, dtype=torch.uint8)
    # As bytes, because numpy lacks bfloat16 and the float8 types.
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Rebuild a tensor from the result of `as_bytes`, as a view of `data`, which is aligned to its element size."""
    return data.view(getattr(torch, dtype)).reshape(shape)


def _pack(tensor: Tensor, protocol: int) -> PackedTensor:
    data = as_bytes(tensor).cpu().numpy().data
    dtype = str(tensor.dtype).removeprefix("torch.")
    return PackedTensor(dtype, tuple(tensor.shape), pieces.cut(data) if protocol >= 5 else [bytearray(data)])
