"""Storage of a batch, and the Python protocols that depend on it: length, equality, text, copy and pickle."""

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase

from tidemill_dataproto import arrays as numpy_half
from tidemill_dataproto import checks
from tidemill_dataproto import tensors as tensor_half
from tidemill_dataproto.equality import same
from tidemill_dataproto.formats import wire
from tidemill_dataproto.tensors import Column, TensorColumns

__all__ = ["BatchState"]


class BatchState:
    """Tensor columns, numpy columns, meta_info and padding marks; `DataProto` adds the operations."""

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
        if not isinstance(other, BatchState):
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
        size = sum(tensor_half.num_bytes(column) for column in columns.values())
        size += sum(array.nbytes for array in self.non_tensor_batch.values())
        padding = f", {self._num_padding()} padding" if self._num_padding() > 0 else ""
        lines = [f"{type(self).__name__}({len(self)} rows{padding}, {_size_text(size)}"]
        lines += [f"  {name}: {tensor_half.describe_column(column)}" for name, column in columns.items()]
        lines += [f"  {name}: {numpy_half.kind_of(array)}, numpy" for name, array in self.non_tensor_batch.items()]
        lines += [f"  meta_info: {', '.join(map(str, self.meta_info))}"] if self.meta_info else []
        return "\n".join(lines) + ")"

    def __copy__(self) -> Self:
        return self._of(len(self), *self._pick(None, None, None), self._padding)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The default uses __reduce_ex__, which moves tensors to the CPU and detaches them.
        columns = tensor_half.map_tensors(self._read(), torch.clone)
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
            numpy_half.check_array(name, array)
            counts[name] = array.shape[0]
        if self._padding is not None:
            counts["padding marks"] = self._padding.shape[0]
        checks.check_counts(counts)
        checks.check_disjoint(columns, self.non_tensor_batch)
        return columns

    def _take(self, rows: np.ndarray) -> Self:
        """Copy the rows, int64 `[M]`, each in 0..B-1."""
        columns = tensor_half.take(self._read(), rows)
        arrays = numpy_half.take(self.non_tensor_batch, rows)
        padding = None if self._padding is None else self._padding[rows]
        return self._of(rows.shape[0], columns, arrays, self.meta_info, padding)

    def _cut(self, bounds: Sequence[int]) -> list[Self]:
        """Cut into the runs of rows between neighbouring, ascending `bounds`."""
        runs = list(pairwise(bounds))
        columns = tensor_half.cut(self._read(), bounds)
        arrays = numpy_half.cut(self.non_tensor_batch, bounds)
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
    cls: type[BatchState],
    num_rows: int,
    packed: wire.Packed,
    arrays: dict[str, np.ndarray],
    meta_info: dict[str, Any],
    padding: np.ndarray | None,
) -> BatchState:
    return cls._of(num_rows, wire.unpack(packed), arrays, meta_info, padding)


def _size_text(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
