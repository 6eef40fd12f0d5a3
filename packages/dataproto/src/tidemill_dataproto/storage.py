"""Storage of a batch: construction, conversion, and the Python protocols (length, equality, text, copy, pickle)."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tidemill_dataproto.columns import checks, numpy_columns, tensor_columns
from tidemill_dataproto.columns.equality import same
from tidemill_dataproto.columns.tensor_columns import Column, TensorColumns
from tidemill_dataproto.formats import arrow, disk, tensordicts, wire
from tidemill_dataproto.items import DataProtoItem, columns_of_items

__all__ = ["BatchStorage"]


class BatchStorage:
    """Tensor columns, numpy columns, meta_info and padding marks; `DataProto` adds operations on rows and columns."""

    __slots__ = ("_padding", "_tensors", "meta_info", "non_tensor_batch")

    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __init__(
        self,
        batch: TensorDictBase | None = None,
        non_tensor_batch: Mapping[str, np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap `batch` without a copy; the dicts are copied. Raises as `check_consistency`."""
        self.batch = batch
        self.non_tensor_batch = dict({} if non_tensor_batch is None else non_tensor_batch)
        self.meta_info = copy.deepcopy(dict({} if meta_info is None else meta_info))
        self._padding: np.ndarray | None = None
        self.check_consistency()

    @classmethod
    def _of(
        cls,
        num_rows: int,
        columns: dict[str, Column],
        arrays: dict[str, np.ndarray],
        meta_info: Mapping[str, Any],
        padding: np.ndarray | None = None,
    ) -> Self:
        """Make a batch of checked columns, with a deep copy of meta_info."""
        new = cls.__new__(cls)
        # Without tensors, numpy columns determine the number of rows, also those added later.
        remembered = None if not columns and (arrays or num_rows == 0) else num_rows
        new._tensors = TensorColumns(columns, remembered)
        new.non_tensor_batch = arrays
        new.meta_info = copy.deepcopy(dict(meta_info))
        new._padding = padding
        return new

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """Make a batch of tensor columns and other columns.

        Args:
            tensors: tensor columns by name, dense `[B, ...]` or ragged `[B, j, ...]`.
            non_tensors: other columns by name: numpy arrays `[B, ...]`, or lists, which become object columns.
            meta_info: values about the whole batch.
            num_batch_dims: number of leading dims that all tensors must share, for example 2 for `[B, n, ...]` with n
                responses per prompt. Rows are dim 0 in any case; `unfold()` makes rows of the first two dims. Above 1,
                all columns must be dense tensors.

        Raises:
            ValueError, TypeError: as `check_consistency`, or the tensors do not share `num_batch_dims` dims.
        """
        columns = tensor_columns.as_columns({} if tensors is None else tensors)
        others = {} if non_tensors is None else non_tensors
        checks.check_batch_dims(columns, others, num_batch_dims)
        arrays = {name: numpy_columns.as_array(name, column) for name, column in others.items()}
        counts = {name: tensor_columns.num_rows_of(column) for name, column in columns.items()}
        counts |= {name: array.shape[0] for name, array in arrays.items()}
        checks.check_counts(counts)
        num_rows = next(iter(counts.values()), 0)
        new = cls._of(num_rows, columns, arrays, {} if meta_info is None else meta_info)
        new.check_consistency()
        return new

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Make a batch as `from_dict`, with tensors and other columns in one dict."""
        tensors = {name: column for name, column in data.items() if isinstance(column, Tensor)}
        others = {name: column for name, column in data.items() if name not in tensors}
        return cls.from_dict(tensors, others, meta_info)

    @classmethod
    def from_items(cls, items: Sequence[DataProtoItem | Mapping[str, Any]], dense: Sequence[str] = ()) -> Self:
        """Make a batch of rows: items as returned by `batch[i]`, or dicts with a value for each column.

        Tensors without dims become a dense column `[B]`. Tensors with dims become rows of a ragged column, or, if
        `dense` names the column, are stacked. Anything else is an object. All items must have the same meta_info.

        Raises:
            ValueError: no items, items with different columns, or rows that do not match; the error names the column.
            KeyError: `dense` names an unknown column.
        """
        return cls.from_dict(*columns_of_items(items, dense))

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDictBase, meta_info: Mapping[str, Any] | None = None) -> Self:
        """Make a batch from a TensorDict; the inverse of `to_tensordict`.

        Tensors, dense or jagged, become tensor columns without a copy, NonTensorStacks object columns, NonTensorData
        items of meta_info, deep-copied.

        Args:
            tensor_dict: a TensorDict of batch_size [B], or of batch_size [] if it holds NonTensorData only.
            meta_info: more items of meta_info.

        Raises:
            TypeError: not a TensorDict, another batch_size, or an entry of another type; the error names it.
            ValueError: a key is in meta_info and in the TensorDict, or a tensor is not a column (`check_consistency`).
        """
        tensors, arrays, meta, padding = tensordicts.of_tensordict(tensor_dict, {} if meta_info is None else meta_info)
        num_rows = tensor_dict.batch_size[0] if tensor_dict.batch_dims == 1 else 0
        new = cls._of(num_rows, tensor_columns.as_columns(tensors), arrays, meta, padding)
        new.check_consistency()
        return new

    def to_tensordict(self) -> TensorDict:
        """Return the batch as a TensorDict of batch_size [B], as newer code of verl passes them.

        Tensor columns are shared. A numpy column becomes a NonTensorStack of its rows, an item of meta_info a
        NonTensorData with a deep copy. `from_tensordict` restores an equal batch: values, dtypes, offsets, objects,
        meta_info and padding marks. The entries `_dataproto_dtypes` (if a numpy column does not hold objects) and
        `_dataproto_padding` (if rows are padding) serve that purpose.

        Raises:
            ValueError: a key of meta_info is not a string, or the name of a column.
        """
        return tensordicts.to_tensordict(len(self), self._read(), self.non_tensor_batch, self.meta_info, self._padding)

    @classmethod
    def from_arrow(cls, table: Any, meta_info: Mapping[str, Any] | None = None, *, as_objects: bool = False) -> Self:
        """Make a batch from a `pyarrow.Table`; rows and columns keep their order.

        Numbers and bools become tensors `[B]`, fixed-size lists of them tensors `[B, n]`, lists of either ragged
        columns, everything else object columns: strings, dicts, lists of dicts (chat messages), columns with nulls.
        uint16, uint32 and uint64, whose rows torch cannot index, become signed integers, or objects if too large.
        With `as_objects`, every column is an object column with the Python values of `table.to_pylist()`.

        Raises:
            TypeError: `table` is not a `pyarrow.Table`.
            ImportError: pyarrow is not installed.
        """
        return cls.from_dict(*arrow.columns_of_table(table, as_objects), meta_info)

    @classmethod
    def from_parquet(cls, path: str | Path, columns: Sequence[str] | None = None, *, as_objects: bool = False) -> Self:
        """Read the `columns` of a parquet file, all if None, rows in file order; kinds of columns as in `from_arrow`.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is truncated or not parquet.
            KeyError: the file lacks one of `columns`.
            ImportError: pyarrow is not installed.
        """
        return cls.from_arrow(arrow.read_parquet(path, columns), as_objects=as_objects)

    @classmethod
    def iter_parquet(
        cls,
        path: str | Path,
        columns: Sequence[str] | None = None,
        *,
        batch_size: int = 1024,
        as_objects: bool = False,
    ) -> Iterator[Self]:
        """Read a parquet file in batches of `batch_size` rows, in file order, the last one shorter.

        Only the row groups of one batch are in memory. A file of zero rows yields nothing. Other arguments and errors
        are those of `from_parquet`; a missing file or column raises before the first batch.

        Raises:
            ValueError: batch_size < 1, or a column has nulls in some batches only, and would be a tensor in some and
                an object column in others; pass as_objects=True.
        """
        batches = arrow.iter_parquet(path, columns, batch_size, as_objects)
        return (cls.from_dict(tensors, objects) for tensors, objects in batches)

    @classmethod
    def load_from_disk(cls, filepath: str | Path, allow_pickle: bool = False) -> Self:
        """Read a file of `save_to_disk`; tensors are on the CPU and read lazily.

        Args:
            filepath: the file.
            allow_pickle: whether to load pickled objects. Unpickling runs code: allow it only for files you trust.

        Raises:
            ValueError: the file is truncated, of another format or a newer version, or contains pickled objects and
                allow_pickle is False.
            FileNotFoundError, IsADirectoryError: the file does not exist.
        """
        return cls._of(*disk.read(Path(filepath), allow_pickle))

    def save_to_disk(self, filepath: str | Path, allow_pickle: bool = False) -> None:
        """Write the batch as one safetensors file, with everything that is not a tensor as JSON in it.

        The file appears, or replaces an older one, when it is complete.

        Args:
            filepath: the file; its folder must exist.
            allow_pickle: whether to pickle objects that have no JSON form.

        Raises:
            TypeError: an object that is neither JSON, tuple, bytes, array nor tensor, nor made of these, without
                allow_pickle; the error names the column and the row.
        """
        disk.write(
            Path(filepath), len(self), self._read(), self.non_tensor_batch, self.meta_info, self._padding, allow_pickle
        )

    @property
    def batch(self) -> TensorDictBase:
        """The tensor columns as a TensorDict; adding or removing an entry changes this batch."""
        return self._tensors.show(len(self))

    @batch.setter
    def batch(self, batch: TensorDictBase | None) -> None:
        self._tensors = TensorColumns({}, None) if batch is None else TensorColumns.of(batch)

    @property
    def is_padding(self) -> np.ndarray:
        """bool `[B]`, a copy: whether `pad_dataproto_to_divisor` added the row."""
        return np.zeros(len(self), dtype=bool) if self._padding is None else self._padding.copy()

    def without_padding(self) -> Self:
        """Return the rows that are not padding; views of this batch if there is no padding."""
        if self._num_padding() > 0:
            return self._take(np.flatnonzero(~self.is_padding))
        return self._of(len(self), *self._pick(None, None, None), self._padding)

    def check_consistency(self) -> None:
        """Check that all columns are valid and have the same number of rows; runs before each operation.

        Raises:
            ValueError: different numbers of rows, a name of both a tensor and a numpy column, or a tensor that is
                neither dense with at least one dim nor jagged with dim 1 ragged; the error names the column.
            TypeError: a column of another type.
        """
        self._read()

    def __len__(self) -> int:
        """Return the number of rows, including padding."""
        num_rows = self._tensors.num_rows
        if num_rows is not None:
            return num_rows
        return next((array.shape[0] for array in self.non_tensor_batch.values()), 0)

    def __contains__(self, name: object) -> bool:
        return name in self.non_tensor_batch or name in self._tensors.read()

    def __eq__(self, other: object) -> bool:
        """Return whether both have equal columns, in any order, meta_info and padding; NaN equals NaN."""
        if not isinstance(other, BatchStorage):
            return NotImplemented
        mine, theirs = self._read(), other._read()
        return (
            len(self) == len(other)
            and same(mine, theirs)
            and same(self.non_tensor_batch, other.non_tensor_batch)
            and same(self.meta_info, other.meta_info)
            and same(self.is_padding, other.is_padding)
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        columns = self._tensors.read()
        size = sum(tensor_columns.num_bytes(column) for column in columns.values())
        size += sum(array.nbytes for array in self.non_tensor_batch.values())
        padding = f", {self._num_padding()} padding" if self._num_padding() > 0 else ""
        lines = [f"{type(self).__name__}({len(self)} rows{padding}, {_size_text(size)}"]
        lines += [f"  {name}: {tensor_columns.describe_column(column)}" for name, column in columns.items()]
        lines += [f"  {name}: {numpy_columns.kind_of(array)}, numpy" for name, array in self.non_tensor_batch.items()]
        lines += [f"  meta_info: {', '.join(map(str, self.meta_info))}"] if self.meta_info else []
        return "\n".join(lines) + ")"

    def __copy__(self) -> Self:
        return self._of(len(self), *self._pick(None, None, None), self._padding)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The default uses __reduce_ex__, which moves tensors to the CPU and detaches them.
        columns = tensor_columns.map_tensors(self._read(), torch.clone)
        new = self._of(len(self), columns, copy.deepcopy(self.non_tensor_batch, memo), {}, self._padding)
        new.meta_info = copy.deepcopy(self.meta_info, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        packed = wire.pack(self._read(), protocol)
        return _unpickle, (type(self), len(self), packed, self.non_tensor_batch, self.meta_info, self._padding)

    def _read(self) -> dict[str, Column]:
        """Return the tensor columns, after `check_consistency`. The dict belongs to this batch."""
        columns = self._tensors.read()
        counts: dict[str, int] = {}
        if self._tensors.num_rows is not None:
            counts["batch"] = self._tensors.num_rows
        for name, array in self.non_tensor_batch.items():
            numpy_columns.check_array(name, array)
            counts[name] = array.shape[0]
        if self._padding is not None:
            counts["padding marks"] = self._padding.shape[0]
        checks.check_counts(counts)
        checks.check_disjoint(columns, self.non_tensor_batch)
        return columns

    def _take(self, rows: np.ndarray) -> Self:
        """Copy the rows, int64 `[M]`, each in 0..B-1."""
        columns = tensor_columns.take(self._read(), rows)
        arrays = numpy_columns.take(self.non_tensor_batch, rows)
        padding = None if self._padding is None else self._padding[rows]
        return self._of(rows.shape[0], columns, arrays, self.meta_info, padding)

    def _cut(self, bounds: Sequence[int]) -> list[Self]:
        """Cut into the runs of rows between neighbouring, ascending `bounds`."""
        runs = list(pairwise(bounds))
        columns = tensor_columns.cut(self._read(), bounds)
        arrays = numpy_columns.cut(self.non_tensor_batch, bounds)
        paddings = [None if self._padding is None else self._padding[a:b] for a, b in runs]
        return [
            self._of(b - a, column_part, array_part, self.meta_info, padding)
            for (a, b), column_part, array_part, padding in zip(runs, columns, arrays, paddings, strict=True)
        ]

    def _pick(
        self,
        batch_keys: Sequence[str] | None,
        non_tensor_batch_keys: Sequence[str] | None,
        meta_info_keys: Sequence[str] | None,
    ) -> tuple[dict[str, Column], dict[str, np.ndarray], dict[str, Any]]:
        """Return the named columns and items of meta_info, all if None; KeyError for an unknown name."""
        return (
            checks.pick(self._read(), batch_keys, "tensor column"),
            checks.pick(self.non_tensor_batch, non_tensor_batch_keys, "non-tensor column"),
            checks.pick(self.meta_info, meta_info_keys, "meta_info key"),
        )

    def _num_padding(self) -> int:
        return 0 if self._padding is None else int(self._padding.sum())

    def _is_bare(self) -> bool:
        """Return whether the batch has neither columns nor rows and can be combined with any batch."""
        return self._tensors.num_rows is None and not self.non_tensor_batch


def _unpickle(
    cls: type[BatchStorage],
    num_rows: int,
    packed: wire.Packed,
    arrays: dict[str, np.ndarray],
    meta_info: dict[str, Any],
    padding: np.ndarray | None,
) -> BatchStorage:
    return cls._of(num_rows, wire.unpack(packed), arrays, meta_info, padding)


def _size_text(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
