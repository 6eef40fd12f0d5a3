"""Gather the batches of all ranks on every rank."""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from tidemill_dataproto.columns.tensor_columns import Column
from tidemill_dataproto.formats.wire import as_bytes, from_bytes
from tidemill_dataproto.proto import DataProto
from tidemill_dataproto.ragged.layout import JaggedColumn, Layout

__all__ = ["agree", "all_gather"]

_CPU = torch.device("cpu")
_ALIGNMENT = 16  # bytes; no element is larger


def all_gather(batch: DataProto, group: dist.ProcessGroup | None = None) -> DataProto:
    """Return the rows of all ranks of `group`, in rank order, without padding rows. Collective.

    Ranks may have different numbers of rows, including none. Tensors are returned on the devices of this rank's
    columns; with NCCL they are sent from its CUDA device.

    Raises:
        ValueError: the batches cannot be concatenated, or that of one rank is inconsistent; raised on all ranks. Part
            numbers in the error are ranks.
    """
    error, columns = None, {}
    try:
        columns = batch._read()
    except (ValueError, TypeError) as caught:
        error = caught
    heads: list[_Head] = agree(_head_of(batch, columns), error, group)
    has_cpu = _CPU in (group or _get_default_group())._device_types  # NCCL alone has not
    device = _CPU if has_cpu else torch.device("cuda", torch.cuda.current_device())
    home = {name: _values_of(column).device for name, column in columns.items()}
    data = _gathered(columns, max(head.num_bytes for head in heads), len(heads), device, group)
    parts = [_part(head, data[rank], home, device) for rank, head in enumerate(heads)]
    return DataProto.concat(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """Metadata of a batch, exchanged before its tensors.

    Attributes:
        columns: dtype, shape of the values, and number of the layout of each column.
        layouts: bounds of each layout.
        num_bytes: size of all values, aligned.
    """

    num_rows: int
    columns: dict[str, tuple[str, tuple[int, ...], int | None]]
    layouts: list[np.ndarray]
    arrays: dict[str, np.ndarray]
    meta_info: dict[str, Any]
    padding: np.ndarray | None
    num_bytes: int


def _head_of(batch: DataProto, columns: Mapping[str, Column]) -> _Head:
    layouts: dict[int, Layout] = {}
    described: dict[str, tuple[str, tuple[int, ...], int | None]] = {}
    for name, column in columns.items():
        number = None
        if isinstance(column, JaggedColumn):
            layouts.setdefault(column.layout.key, column.layout)
            number = list(layouts).index(column.layout.key)
        values = _values_of(column)
        described[name] = str(values.dtype).removeprefix("torch."), tuple(values.shape), number
    return _Head(
        num_rows=len(batch),
        columns=described,
        layouts=[layout.bounds for layout in layouts.values()],
        arrays=batch.non_tensor_batch,
        meta_info=batch.meta_info,
        padding=batch._padding,
        num_bytes=sum(_aligned(_values_of(column).nbytes) for column in columns.values()),
    )


def _gathered(
    columns: Mapping[str, Column], num_bytes: int, num_ranks: int, device: torch.device, group: Any
) -> Tensor:
    """Return the bytes of all columns of each rank, uint8 `[ranks, num_bytes]`, padded to the largest rank."""
    mine = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    at = 0
    for column in columns.values():
        data = as_bytes(_values_of(column))
        mine[at : at + data.shape[0]] = data
        at += _aligned(data.shape[0])
    everyones = torch.empty(num_ranks * num_bytes, dtype=torch.uint8, device=device)
    if num_bytes > 0:
        dist.all_gather_into_tensor(everyones, mine, group=group)
    return everyones.reshape(num_ranks, num_bytes)


def _part(head: _Head, data: Tensor, home: Mapping[str, torch.device], device: torch.device) -> DataProto:
    layouts: dict[tuple[int, torch.device], Layout] = {}
    columns: dict[str, Column] = {}
    for (name, (dtype, shape, number)), values in zip(head.columns.items(), _values(head, data), strict=True):
        where = home.get(name, device)
        tensor = from_bytes(values, dtype, shape).to(where)
        if number is None:
            columns[name] = tensor
        else:
            layout = layouts.setdefault((number, where), Layout(head.layouts[number], where))
            columns[name] = JaggedColumn(tensor, layout)
    return DataProto._of(head.num_rows, columns, dict(head.arrays), head.meta_info, head.padding)


def _values(head: _Head, data: Tensor) -> Iterator[Tensor]:
    at = 0
    for dtype, shape, _ in head.columns.values():
        size = int(np.prod(shape)) * getattr(torch, dtype).itemsize
        yield data[at : at + size]
        at += _aligned(size)


def _values_of(column: Column) -> Tensor:
    return column.values if isinstance(column, JaggedColumn) else column


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def agree(value: Any, error: Exception | None, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather one value of each rank, in rank order, or raise the error of one rank on all. Collective.

    Raises:
        ValueError: one rank passed an error, or a value that cannot be pickled; names the first such rank of the group.
    """
    data = b""
    if error is None:
        try:  # torch would raise on this rank only, and the others would wait for it
            data = pickle.dumps(value, protocol=5)
        except Exception as caught:  # noqa: BLE001 - raised below, on all ranks; __reduce__ of users may raise anything
            error = TypeError(
                f"expected objects that can be pickled ({caught}); drop or convert the object or the item of meta_info"
            )
    reports: list[Any] = [None] * dist.get_world_size(group)
    text = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(reports, (data, text), group=group)
    for rank, (_, found) in enumerate(reports):
        if found is not None:
            raise ValueError(f"rank {rank} of {len(reports)}: {found}") from error
    return [pickle.loads(received) for received, _ in reports]
