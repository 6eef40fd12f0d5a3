"""Row operations on the columns of one batch: cut into runs of rows, take rows by index, join.

A column is a dense tensor `[B, ...]`, a ragged one `[B, j, ...]` or a numpy array `[B, ...]`. Ragged columns that share
their offsets share the index arithmetic, and the results share their offsets again.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill_dataproto import ragged

__all__ = [
    "array_kind",
    "as_row_index",
    "cut_arrays",
    "cut_tensors",
    "join_arrays",
    "join_tensors",
    "move_tensors",
    "object_column",
    "size_text",
    "take_tensors",
    "tensor_kind",
]

_Layouts = dict[int, Any]  # of this call's offsets, by id: what was computed from them


def object_column(rows: Sequence[Any]) -> np.ndarray:
    """A numpy object column `[B]` that holds `rows` as they are: lists of equal length stay lists."""
    return np.fromiter(rows, dtype=object, count=len(rows))


def as_row_index(index: Any, num_rows: int) -> Tensor:
    """Turns a list, mask, tensor or array of rows into int64 `[M]` on the CPU, each in 0..num_rows-1.

    Raises:
        TypeError: not integers or bools.
        ValueError: not one-dimensional, or a mask of another length than num_rows.
        IndexError: a row outside -num_rows..num_rows-1.
    """
    if isinstance(index, Tensor):
        rows = index.detach().cpu()
    elif isinstance(index, np.ndarray | list | tuple | range):
        array = np.asarray(index)
        if array.size > 0 and array.dtype.kind not in "iub":
            raise TypeError(f"expected rows as integers or a bool mask, got {array.dtype}")
        rows = torch.from_numpy(np.ascontiguousarray(array, dtype=bool if array.dtype == bool else np.int64))
    else:
        raise TypeError(f"expected rows as a list, mask, tensor or array, got {type(index).__name__}")
    if rows.dim() != 1:
        raise ValueError(f"expected rows as one dimension, got shape {list(rows.shape)}")
    if rows.dtype == torch.bool:
        if rows.shape[0] != num_rows:
            raise ValueError(f"expected a mask of {num_rows} rows, as the batch has, got {rows.shape[0]}")
        return rows.nonzero().flatten()
    if rows.numel() == 0:
        return rows.new_zeros(0, dtype=torch.int64)
    if rows.is_floating_point() or rows.is_complex():
        raise TypeError(f"expected rows as integers or a bool mask, got {rows.dtype}")
    rows = rows.long()
    low, high = int(rows.min()), int(rows.max())
    if low < -num_rows or high >= num_rows:
        raise IndexError(f"row {low if low < -num_rows else high} is out of range for a batch of {num_rows} rows")
    return torch.where(rows < 0, rows + num_rows, rows) if low < 0 else rows


def cut_tensors(columns: Mapping[str, Tensor], bounds: Sequence[int]) -> list[dict[str, Tensor]]:
    """Cuts into the runs of rows between neighbouring `bounds`, as views of the columns."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(len(bounds) - 1)]
    layouts: _Layouts = {}
    for name, column in columns.items():
        pieces = _cut_ragged(column, bounds, layouts) if column.is_nested else _cut_dense(column, bounds)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def cut_arrays(columns: Mapping[str, np.ndarray], bounds: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Cuts into the runs of rows between neighbouring `bounds`, as views of the columns."""
    return [{name: array[a:b] for name, array in columns.items()} for a, b in pairwise(bounds)]


def take_tensors(columns: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """Copies the rows `index` (int64 `[M]` on the CPU)."""
    layouts: _Layouts = {}
    devices: dict[torch.device, Tensor] = {}

    def on(device: torch.device) -> Tensor:
        if device not in devices:
            devices[device] = index.to(device)
        return devices[device]

    return {
        name: _take_ragged(column, on(column.device), layouts)
        if column.is_nested
        else column.index_select(0, on(column.device))
        for name, column in columns.items()
    }


def join_tensors(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenates the rows of the parts, column by column.

    Raises:
        ValueError: a part has other columns, or a column differs in kind, dtype, device or row shape; named.
    """
    _check_names(parts)
    layouts: _Layouts = {}
    joined: dict[str, Tensor] = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        _check_kinds(name, [tensor_kind(piece) for piece in pieces])
        joined[name] = _join_ragged(pieces, layouts) if pieces[0].is_nested else torch.cat(pieces)
    return joined


def join_arrays(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenates the rows of the parts; raises as `join_tensors`. Strings of different widths go together."""
    _check_names(parts)
    joined: dict[str, np.ndarray] = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        _check_kinds(name, [array_kind(piece) for piece in pieces])
        joined[name] = np.concatenate(pieces)
    return joined


def move_tensors(columns: Mapping[str, Tensor], move: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Applies `move`, which keeps shapes, to dense columns and to values and offsets of ragged ones."""
    layouts: _Layouts = {}
    moved: dict[str, Tensor] = {}
    for name, column in columns.items():
        if column.is_nested:
            bounds = ragged.offsets(column)
            if id(bounds) not in layouts:
                layouts[id(bounds)] = move(bounds)
            moved[name] = ragged.unchecked(move(column.values()), layouts[id(bounds)])
        else:
            moved[name] = move(column)
    return moved


def _cut_dense(column: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    return [column[a:b] for a, b in pairwise(bounds)]


def _cut_ragged(column: Tensor, bounds: Sequence[int], layouts: _Layouts) -> list[Tensor]:
    offsets, flat = ragged.offsets(column), column.values()
    if id(offsets) not in layouts:
        edges = offsets[torch.tensor(bounds, device=offsets.device)].tolist()
        layouts[id(offsets)] = edges, [offsets[a : b + 1] - offsets[a] for a, b in pairwise(bounds)]
    edges, pieces = layouts[id(offsets)]
    return [ragged.unchecked(flat[a:b], piece) for (a, b), piece in zip(pairwise(edges), pieces, strict=True)]


def _take_ragged(column: Tensor, index: Tensor, layouts: _Layouts) -> Tensor:
    offsets = ragged.offsets(column)
    if id(offsets) not in layouts:
        layouts[id(offsets)] = ragged.index_plan(offsets, index)
    plan, new_offsets = layouts[id(offsets)]
    return ragged.unchecked(column.values().index_select(0, plan), new_offsets)


def _join_ragged(pieces: Sequence[Tensor], layouts: dict[Any, Tensor]) -> Tensor:
    all_offsets = [ragged.offsets(piece) for piece in pieces]
    layout = tuple(id(offsets) for offsets in all_offsets)
    flats = [piece.values() for piece in pieces]
    if layout not in layouts:
        runs, start = [all_offsets[0][:1]], 0
        for offsets, flat in zip(all_offsets, flats, strict=True):
            runs.append(offsets[1:] + start)
            start += flat.shape[0]
        layouts[layout] = torch.cat(runs)
    return ragged.unchecked(torch.cat(flats), layouts[layout])


def _check_names(parts: Sequence[Mapping[str, Any]]) -> None:
    for number, part in enumerate(parts):
        missing, extra = parts[0].keys() - part.keys(), part.keys() - parts[0].keys()
        if missing or extra:
            raise ValueError(
                f"expected the same columns in all parts; part {number} lacks {sorted(missing)} of part 0 and has "
                f"{sorted(extra)} besides; select() the common ones first"
            )


def _check_kinds(name: str, kinds: Sequence[str]) -> None:
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(f"column {name!r} is {kind} in part {number}, but {kinds[0]} in part 0; convert one first")


def tensor_kind(column: Tensor) -> str:
    shape = ["B", "j", *column.values().shape[1:]] if column.is_nested else ["B", *column.shape[1:]]
    return f"{str(column.dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}] on {column.device}"


def array_kind(column: np.ndarray) -> str:
    dtype = {"O": "object", "U": "str", "S": "bytes"}.get(column.dtype.kind, str(column.dtype))
    return f"{dtype} [{', '.join(map(str, ['B', *column.shape[1:]]))}]"


def size_text(num_bytes: float) -> str:
    """A number of bytes for a reader, as 12.3 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
