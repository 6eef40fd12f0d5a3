"""Pickling of a batch: every tensor as one buffer, which protocol 5 can pass on without a copy."""

import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tidemill_dataproto import ragged

__all__ = ["pack_tensors", "unpack_tensors"]

_Packed = tuple[str, tuple[int, ...], Any]  # dtype, shape, buffer


def pack_tensors(columns: Mapping[str, Tensor], protocol: int) -> tuple[list[_Packed], dict[str, Any]]:
    """Packs columns for `unpack_tensors`: (distinct offsets, per column a packed tensor and the number of its offsets).

    CPU tensors are not copied, unless they are not contiguous or `protocol` is below 5; others are moved to the CPU.
    A slice of a larger tensor packs its own bytes only. Gradients are left behind.
    """
    layouts: list[_Packed] = []
    numbers: dict[int, int] = {}
    packed: dict[str, Any] = {}
    for name, column in columns.items():
        if column.is_nested:
            offsets = ragged.offsets(column)
            if id(offsets) not in numbers:
                numbers[id(offsets)] = len(layouts)
                layouts.append(_pack(offsets, protocol))
            packed[name] = _pack(column.values(), protocol), numbers[id(offsets)]
        else:
            packed[name] = _pack(column, protocol), None
    return layouts, packed


def unpack_tensors(layouts: list[_Packed], packed: dict[str, Any]) -> dict[str, Tensor]:
    """Makes the columns of what `pack_tensors` packed, as views of the buffers."""
    all_offsets = [_unpack(*layout) for layout in layouts]
    columns: dict[str, Tensor] = {}
    for name, (tensor, number) in packed.items():
        column = _unpack(*tensor)
        columns[name] = column if number is None else ragged.unchecked(column, all_offsets[number])
    return columns


def _pack(tensor: Tensor, protocol: int) -> _Packed:
    plain = tensor.detach().cpu().contiguous()
    # As bytes, because numpy lacks bfloat16 and the float8 types.
    data = plain.reshape(-1).view(torch.uint8).numpy().data
    buffer = pickle.PickleBuffer(data) if protocol >= 5 else bytearray(data)
    return str(plain.dtype).removeprefix("torch."), tuple(plain.shape), buffer


def _unpack(dtype_name: str, shape: tuple[int, ...], buffer: Any) -> Tensor:
    dtype = getattr(torch, dtype_name)
    if memoryview(buffer).nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():  # buffers out of an object store are read-only; the class documents it
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=dtype).reshape(shape)
