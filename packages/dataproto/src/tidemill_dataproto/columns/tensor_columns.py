"""Tensor columns of a batch and their row operations.

A column is a dense tensor `[B, ...]` or a `JaggedColumn`. Columns that share a Layout share the index arithmetic of an
operation, and the results share a Layout again. The functions here create neither nested tensors nor TensorDicts, which
takes longer than cutting a column; `TensorColumns` creates them on request.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tidemill_dataproto.columns import checks
from tidemill_dataproto.ragged.columns import is_ragged, open_column
from tidemill_dataproto.ragged.layout import JaggedColumn, Layout, on_device
from tidemill_dataproto.ragged.row_copy import RowCopy

__all__ = [
    "Column",
    "TensorColumns",
    "as_columns",
    "as_tensor",
    "check_fill",
    "cut",
    "describe_column",
    "fill",
    "join",
    "kind_of",
    "map_tensors",
    "num_bytes",
    "num_rows_of",
    "take",
    "union",
]

Column = Tensor | JaggedColumn


class TensorColumns:
    """The tensor columns of one batch, and a TensorDict of them once it has been requested.

    Callers may add and remove entries of that TensorDict, so from then on it is the source of truth: `read` returns its
    columns.
    """

    __slots__ = ("_columns", "_num_rows", "_shown")

    def __init__(self, columns: dict[str, Column], num_rows: int | None) -> None:
        """Store checked columns. `num_rows` is None only without columns, if nothing else determines it."""
        self._columns = columns
        self._num_rows = num_rows
        self._shown: TensorDictBase | None = None

    @classmethod
    def of(cls, shown: TensorDictBase) -> "TensorColumns":
        """Make the columns of a TensorDict, and keep it as the one that `show` returns. Raises as `read`."""
        checks.check_type(shown, TensorDictBase, "a TensorDict with batch_size [B]")
        columns = cls({}, None)
        columns._shown = shown
        columns.read()
        return columns

    @property
    def num_rows(self) -> int | None:
        """Number of rows; None for no columns and no rows, which can be combined with any number of rows."""
        if self._shown is None:
            return self._num_rows
        size = self._shown.batch_size[0]
        return None if size == 0 and self._shown.is_empty() else size

    def show(self, num_rows: int) -> TensorDictBase:
        """Return the columns as a TensorDict of `num_rows` rows; always the same object."""
        if self._shown is None:
            tensors: Any = {name: as_tensor(column) for name, column in self._columns.items()}
            # The public constructor checks, which takes longer than most row operations.
            self._shown = TensorDict._new_unsafe(tensors, batch_size=torch.Size([num_rows]))
        return self._shown

    def read(self) -> dict[str, Column]:
        """Return the current columns; checks those that are new. The dict belongs to this object.

        Raises:
            ValueError, TypeError: an entry of the TensorDict is not a valid column; the error names it.
        """
        shown, known = self._shown, self._columns
        if shown is None:
            return known
        if shown.batch_dims != 1:
            raise ValueError(
                f"expected a TensorDict with batch_size [B], got {list(shown.batch_size)}; set batch.batch_size = [B]"
            )
        if any(not _is_shown_as(known.get(name), tensor) for name, tensor in shown.items()) or len(known) != len(
            shown.keys()
        ):
            layouts = _layouts_of(known.values())
            self._columns = {
                name: known[name] if _is_shown_as(known.get(name), tensor) else as_column(name, tensor, layouts)
                for name, tensor in shown.items()
            }
        return self._columns


def as_tensor(column: Column) -> Tensor:
    """Return a column as users see it: a ragged one as a nested tensor."""
    return column.tensor if isinstance(column, JaggedColumn) else column


def as_columns(tensors: Mapping[str, Any]) -> dict[str, Column]:
    """Convert tensors of users to columns. Raises as `as_column`."""
    layouts: dict[int, Layout] = {}
    return {name: as_column(name, tensor, layouts) for name, tensor in tensors.items()}


def as_column(name: str, tensor: Any, layouts: dict[int, Layout]) -> Column:
    """Check a tensor and convert it to a column. `layouts` holds the layouts of the batch by key.

    Raises:
        TypeError: not a tensor, or its name is not a string.
        ValueError: neither dense with at least one dim nor jagged with dim 1 ragged.
    """
    if not isinstance(name, str):
        raise TypeError(f"expected a column name as a string, got {name!r}")
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"column {name!r}: expected a tensor, got {type(tensor).__name__}; put other columns into "
            f"non_tensor_batch, or convert a TensorDict with DataProto.from_tensordict()"
        )
    if is_ragged(tensor):
        column = open_column(tensor)
        column.layout = layouts.setdefault(column.layout.key, column.layout)
        if not column.layout.fits(column.values.shape[0]):
            raise ValueError(
                f"column {name!r}: expected offsets from 0 to the number of values; make the column with "
                f"ragged.ragged()"
            )
        return column
    if tensor.layout != torch.strided or tensor.is_nested or tensor.dim() == 0:
        kind = "nested tensor" if tensor.is_nested else f"tensor of {tensor.dim()} dims"
        raise ValueError(
            f"column {name!r}: expected a dense tensor [B, ...] or a jagged one [B, j, ...], got a {kind} of layout "
            f"{tensor.layout}; convert it with ragged.ragged_from_list() or tensor.to_dense()"
        )
    return tensor


def num_rows_of(column: Column) -> int:
    """Return the number of rows."""
    return column.layout.num_rows if isinstance(column, JaggedColumn) else column.shape[0]


def num_bytes(column: Column) -> int:
    """Return the bytes of the values."""
    return (column.values if isinstance(column, JaggedColumn) else column).nbytes


def kind_of(column: Column) -> str:
    """Describe dtype, row shape and device, which must agree for columns to be concatenated."""
    if isinstance(column, JaggedColumn):
        flat, shape = column.values, ["B", "j", *column.values.shape[1:]]
    else:
        flat, shape = column, ["B", *column.shape[1:]]
    return f"{str(flat.dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}] on {flat.device}"


def describe_column(column: Column) -> str:
    """Describe a column for `repr`: `kind_of` and the range of row lengths."""
    if not isinstance(column, JaggedColumn) or column.layout.num_rows == 0:
        return kind_of(column)
    lengths = column.layout.lengths
    return f"{kind_of(column)}, rows of {lengths.min()} to {lengths.max()}"


def cut(columns: Mapping[str, Column], bounds: Sequence[int]) -> list[dict[str, Column]]:
    """Cut into the runs of rows between neighbouring `bounds`, as views of the columns."""
    rows = np.array(bounds)
    parts: list[dict[str, Column]] = [{} for _ in bounds[1:]]
    layouts: dict[int, tuple[list[int], list[Layout]]] = {}
    for name, column in columns.items():
        if isinstance(column, JaggedColumn):
            layout = column.layout
            if layout.key not in layouts:
                layouts[layout.key] = layout.bounds[rows].tolist(), [layout.cut(a, b) for a, b in pairwise(bounds)]
            edges, cuts = layouts[layout.key]
            for part, values, layout in zip(parts, _runs_of(column.values, edges), cuts, strict=True):
                part[name] = JaggedColumn(values, layout)
        else:
            for part, piece in zip(parts, _runs_of(column, bounds), strict=True):
                part[name] = piece
    return parts


def take(columns: Mapping[str, Column], rows: np.ndarray) -> dict[str, Column]:
    """Copy the rows (int64 `[M]`, each in 0..B-1)."""
    copies: dict[int, RowCopy] = {}
    indices: dict[torch.device, Tensor] = {}
    taken: dict[str, Column] = {}
    for name, column in columns.items():
        if isinstance(column, JaggedColumn):
            key = column.layout.key
            if key not in copies:
                copies[key] = RowCopy(column.layout, rows)
            taken[name] = copies[key].apply(column)
        else:
            if column.device not in indices:
                indices[column.device] = on_device(torch.from_numpy(rows), column.device)
            taken[name] = column.index_select(0, indices[column.device])
    return taken


def join(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Concatenate the rows of parts that have the same columns, of the same kinds."""
    layouts: dict[tuple[int, ...], Layout] = {}
    joined: dict[str, Column] = {}
    for name, first in parts[0].items():
        pieces: list[Any] = [part[name] for part in parts]
        if isinstance(first, JaggedColumn):
            key = tuple(piece.layout.key for piece in pieces)
            if key not in layouts:
                lengths = np.concatenate([piece.layout.lengths for piece in pieces])
                layouts[key] = Layout.of_lengths(lengths, first.layout.device)
            joined[name] = JaggedColumn(torch.cat([piece.values for piece in pieces]), layouts[key])
        else:
            joined[name] = torch.cat(pieces)
    return joined


def union(mine: Mapping[str, Column], others: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns of both; those of `mine` where both have a name, with equal columns.

    Columns of `others` that share a Layout with such a column share that of `mine` in the result.
    """
    layouts: dict[int, Layout] = {}
    for name, column in others.items():
        same = mine.get(name)
        if isinstance(column, JaggedColumn) and isinstance(same, JaggedColumn):
            layouts[column.layout.key] = same.layout
    both = dict(mine)
    for name, column in others.items():
        if isinstance(column, JaggedColumn) and column.layout.key in layouts:
            column = JaggedColumn(column.values, layouts[column.layout.key])
        both.setdefault(name, column)
    return both


def fill(name: str, like: Column, num_rows: int, value: Any) -> Column:
    """Make a column of the kind of `like` filled with the number `value`; a ragged one has empty rows.

    Raises:
        ValueError: `value` is not a number, or one that the dtype cannot represent.
    """
    if isinstance(like, JaggedColumn):
        return JaggedColumn(like.values[:0], Layout(np.zeros(num_rows + 1, dtype=np.int64), like.layout.device))
    check_fill(name, like, value)
    return like.new_full((num_rows, *like.shape[1:]), value)


def check_fill(name: str, like: Tensor, value: Any) -> None:
    """Raise ValueError unless `value` is a number that the dtype of `like` can represent."""
    dtype, number = like.dtype, np.asarray(value).tolist()
    if dtype == torch.bool:
        checks.check_fits(name, number, dtype, 0, 1)
    elif dtype.is_floating_point:
        checks.check_fits(name, number, dtype, torch.finfo(dtype).min, torch.finfo(dtype).max, is_float=True)
    elif not dtype.is_complex:
        checks.check_fits(name, number, dtype, torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def to_device(columns: Mapping[str, Column], device: torch.device, *, non_blocking: bool) -> dict[str, Column]:
    """Copy columns to a device."""

    def move(tensor: Tensor) -> Tensor:
        if non_blocking and tensor.device.type == "cpu":
            return on_device(tensor, device)
        return tensor.to(device, non_blocking=non_blocking)

    return map_tensors(columns, move)


def map_tensors(columns: Mapping[str, Column], move: Callable[[Tensor], Tensor]) -> dict[str, Column]:
    """Apply `move`, which keeps shapes, to dense columns and to the values of ragged ones."""
    layouts: dict[tuple[int, torch.device], Layout] = {}
    moved: dict[str, Column] = {}
    for name, column in columns.items():
        if isinstance(column, JaggedColumn):
            values = move(column.values)
            layout = layouts.setdefault((column.layout.key, values.device), column.layout.to(values.device))
            moved[name] = JaggedColumn(values, layout)
        else:
            moved[name] = move(column)
    return moved


def _runs_of(tensor: Tensor, edges: Sequence[int]) -> Sequence[Tensor]:
    if len(edges) == 2:
        return [tensor[edges[0] : edges[1]]]
    if edges[0] != 0 or edges[-1] != tensor.shape[0]:
        tensor = tensor[edges[0] : edges[-1]]
    return torch.split_with_sizes(tensor, [b - a for a, b in pairwise(edges)])


def _is_shown_as(column: Column | None, tensor: Any) -> bool:
    return (column.made_tensor() if isinstance(column, JaggedColumn) else column) is tensor


def _layouts_of(columns: Iterable[Column]) -> dict[int, Layout]:
    return {column.layout.key: column.layout for column in columns if isinstance(column, JaggedColumn)}
