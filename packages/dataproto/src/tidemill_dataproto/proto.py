"""The batch container."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tidemill_dataproto import checks, wire
from tidemill_dataproto import columns as cols
from tidemill_dataproto.meta import merge_meta, same

__all__ = ["DataProto"]


class DataProto:
    """Rows of one batch: tensor columns, numpy columns, and facts about the whole batch.

    Attributes:
        batch: a TensorDict of the tensor columns, dense `[B, ...]` or ragged `[B, j, ...]` (see
            `tidemill_dataproto.ragged`); None in a batch without any.
        non_tensor_batch: numpy columns `[B]`, of objects or numbers. An object column has one dimension, whatever its
            objects are; `from_dict` makes it of any list.
        meta_info: anything that is not per row. Every batch has its own deep copy.

    Operations return a new batch and leave their inputs alone, except `pop`. `chunk`, `split`, slices, `select` and
    `rename` share memory with the batch they come from; index, mask, `concat`, `reorder` and `repeat` copy. Objects in
    object columns are shared always.

    A batch pickles with one buffer per tensor, on the CPU. What is unpickled from buffers that the reader shares with
    others, as in Ray, is a view of them: write to a `clone()`, not in place.
    """

    __slots__ = ("batch", "meta_info", "non_tensor_batch")

    def __init__(
        self,
        batch: TensorDictBase | None = None,
        non_tensor_batch: Mapping[str, np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Wraps `batch` without a copy; the dicts are copied. Raises as `check_consistency`."""
        self.batch = batch
        self.non_tensor_batch: dict[str, np.ndarray] = dict({} if non_tensor_batch is None else non_tensor_batch)
        self.meta_info: dict[str, Any] = copy.deepcopy(dict({} if meta_info is None else meta_info))
        self.check_consistency()
        for name, column in self._tensors().items():
            checks.check_tensor(name, column)

    @classmethod
    def _of(
        cls,
        num_rows: int,
        tensors: Mapping[str, Any] | None,
        arrays: dict[str, np.ndarray],
        meta_info: Mapping[str, Any],
    ) -> "DataProto":
        """A batch of columns known to be good, with a deep copy of meta_info."""
        new = cls.__new__(cls)
        # The checking constructor of TensorDict takes longer than the row operation, 60 us per ragged column.
        # Without any column, an empty TensorDict remembers the number of rows.
        source: Any = (
            None if tensors is None and (arrays or num_rows == 0) else dict({} if tensors is None else tensors)
        )
        new.batch = None if source is None else TensorDict._new_unsafe(source, batch_size=torch.Size([num_rows]))
        new.non_tensor_batch = arrays
        new.meta_info = copy.deepcopy(dict(meta_info))
        return new

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> "DataProto":
        """Makes a batch of tensor columns and other columns: numpy arrays, or lists, which become object columns.

        Raises:
            ValueError: columns of different length, a name in both halves, or a tensor that is neither dense with at
                least one dim nor jagged with dim 1 ragged; the error names the column.
            TypeError: a column of another type.
        """
        tensors = {} if tensors is None else dict(tensors)
        others = {} if non_tensors is None else non_tensors
        for name, column in tensors.items():
            checks.check_tensor(name, column)
        arrays = {name: checks.as_array(name, column) for name, column in others.items()}
        counts = {name: column.shape[0] for name, column in [*tensors.items(), *arrays.items()]}
        checks.check_counts(counts)
        num_rows = next(iter(counts.values()), 0)
        new = cls._of(num_rows, tensors if tensors else None, arrays, {} if meta_info is None else meta_info)
        new.check_consistency()
        return new

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> "DataProto":
        """As `from_dict`, with tensors and other columns in one dict."""
        tensors = {name: column for name, column in data.items() if isinstance(column, Tensor)}
        others = {name: column for name, column in data.items() if name not in tensors}
        return cls.from_dict(tensors, others, meta_info)

    def check_consistency(self) -> None:
        """Checks that both halves have the same number of rows and no common names; runs before each operation.

        Raises:
            ValueError: or not; the error names the column.
            TypeError: a column of non_tensor_batch is not a numpy array.
        """
        counts: dict[str, int] = {}
        if self.batch is not None:
            if self.batch.batch_dims != 1:
                raise ValueError(f"expected a TensorDict with batch_size [B], got {list(self.batch.batch_size)}")
            counts["batch"] = self.batch.batch_size[0]
            for name, column in self.batch.items():
                if not isinstance(column, Tensor):
                    checks.check_tensor(name, column)
        for name, array in self.non_tensor_batch.items():
            checks.check_array(name, array)
            counts[name] = array.shape[0]
        checks.check_counts(counts)
        both = self._tensors().keys() & self.non_tensor_batch.keys()
        if both:
            raise ValueError(f"columns {sorted(both)} are in both halves of the batch; rename or pop one of each")

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return next((array.shape[0] for array in self.non_tensor_batch.values()), 0)

    def __contains__(self, name: object) -> bool:
        return name in self.non_tensor_batch or name in self._tensors()

    def __getitem__(self, item: Any) -> Any:
        """A column by name (str), or rows as a batch: slice, list of rows, bool mask, int tensor or array.

        Raises:
            KeyError: no such column; the known ones are listed.
            TypeError: an int: a batch has no single rows; `batch[i:i + 1]` is a batch of one.
            IndexError: a row out of range.
        """
        if isinstance(item, str):
            tensors = self._tensors()
            if item in tensors:
                return tensors[item]
            checks.check_known("column", [item], [*tensors, *self.non_tensor_batch])
            return self.non_tensor_batch[item]
        if isinstance(item, int | np.integer):
            raise TypeError(
                f"expected a slice, list, mask or tensor of rows, got the int {item}; use [{item}:{item + 1}]"
            )
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            if step == 1:
                return self._cut([start, max(start, stop)])[0]
            return self.select_idxs(range(start, stop, step))
        return self.select_idxs(item)

    __iter__ = None  # rows come from make_iterator() or split()

    def select_idxs(self, idxs: Any) -> "DataProto":
        """Copies the rows `idxs`: integers (negative ones count from the end) or a bool mask; list, tensor or array."""
        self.check_consistency()
        return self._take(cols.as_row_index(idxs, len(self)))

    def reorder(self, indices: Any) -> "DataProto":
        """The rows in the order `indices`, a permutation of 0..B-1 (ValueError if it is not one)."""
        self.check_consistency()
        index = cols.as_row_index(indices, len(self))
        if not torch.equal(index.sort().values, torch.arange(len(self))):
            raise ValueError(f"expected a permutation of {len(self)} rows; use select_idxs() to drop or repeat rows")
        return self._take(index)

    def repeat(self, times: int, interleave: bool = True) -> "DataProto":
        """Each row `times` times: next to each other (0 0 1 1), or the whole batch over again (0 1 0 1)."""
        if times < 0:
            raise ValueError(f"expected times >= 0, got {times}")
        self.check_consistency()
        rows = torch.arange(len(self))
        return self._take(rows.repeat_interleave(times) if interleave else rows.repeat(times))

    def chunk(self, chunks: int, allow_unequal: bool = False) -> list["DataProto"]:
        """Cuts into `chunks` batches of neighbouring rows.

        With allow_unequal, the first B % chunks parts have one row more than the others; with fewer rows than chunks,
        the last parts have none.

        Raises:
            ValueError: chunks < 1, or the rows do not divide and allow_unequal is False.
        """
        if chunks < 1:
            raise ValueError(f"expected at least one chunk, got {chunks}")
        size, more = divmod(len(self), chunks)
        if more and not allow_unequal:
            raise ValueError(f"{len(self)} rows do not divide into {chunks} equal chunks; pass allow_unequal=True")
        return self._cut([part * size + min(part, more) for part in range(chunks + 1)])

    def split(self, split_size: int) -> list["DataProto"]:
        """Cuts into batches of `split_size` rows, the last with what is left; zero rows into one batch of zero rows."""
        if split_size < 1:
            raise ValueError(f"expected a split_size of at least one row, got {split_size}")
        return self._cut([*range(0, max(len(self), 1), split_size), len(self)])

    def make_iterator(
        self, mini_batch_size: int, epochs: int = 1, seed: int | None = None, shuffle: bool = True
    ) -> Iterator["DataProto"]:
        """Yields every row once per epoch, in batches of `mini_batch_size`, the last of an epoch with what is left.

        The order of an epoch depends on seed and epoch only; without a seed, one is drawn from torch's CPU generator.
        Zero rows yield nothing.
        """
        if mini_batch_size < 1 or epochs < 0:
            raise ValueError(f"expected mini_batch_size >= 1 and epochs >= 0, got {mini_batch_size} and {epochs}")
        self.check_consistency()
        if shuffle and seed is None:
            seed = int(torch.randint(2**31, ()))
        return self._iterate(mini_batch_size, epochs, seed if shuffle else None)

    def _iterate(self, size: int, epochs: int, seed: int | None) -> Iterator["DataProto"]:
        for epoch in range(epochs):
            order = np.arange(len(self))
            if seed is not None:
                order = np.random.default_rng([seed, epoch]).permutation(order)
            for start in range(0, len(self), size):
                yield self.select_idxs(order[start : start + size])

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """The named columns and facts; None means all. KeyError for an unknown name."""
        self.check_consistency()
        tensors, arrays, meta = self._pick(batch_keys, non_tensor_batch_keys, meta_info_keys)
        return self._of(len(self), None if self.batch is None else tensors, arrays, meta)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Moves the named columns and facts out of this batch into a new one; None means none of them. KeyError, before
        anything moves, for an unknown name."""
        self.check_consistency()
        num_rows = len(self)
        keys = [() if keys is None else keys for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        tensors, arrays, meta = self._pick(*keys)
        popped = self._of(num_rows, tensors if tensors else None, arrays, meta)
        for name in arrays:
            del self.non_tensor_batch[name]
        for key in meta:
            del self.meta_info[key]
        rest = None if self.batch is None else {k: v for k, v in self._tensors().items() if k not in tensors}
        self.batch = self._of(num_rows, rest, self.non_tensor_batch, {}).batch
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """A batch with other names for some columns of either half.

        Raises:
            KeyError: an unknown old name.
            ValueError: not as many new names as old ones, or a new name is in use.
        """
        self.check_consistency()
        old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
        tensors = self._tensors()
        names = [*tensors, *self.non_tensor_batch]
        checks.check_known("column", old, names)
        if len(old) != len(new):
            raise ValueError(f"expected as many new names as old ones, got {old} and {new}")
        to = dict(zip(old, new, strict=True))
        renamed = [to.get(name, name) for name in names]
        if len(set(renamed)) != len(names) or len(to) != len(old):
            raise ValueError(f"renaming {old} to {new} would give two columns one name; the columns are {names}")
        tensors = {to.get(name, name): column for name, column in tensors.items()}
        arrays = {to.get(name, name): column for name, column in self.non_tensor_batch.items()}
        return self._of(len(self), None if self.batch is None else tensors, arrays, self.meta_info)

    def union(self, other: "DataProto") -> "DataProto":
        """A batch with the columns and facts of both.

        Raises:
            ValueError: another number of rows, or a column or fact that both have with different values; the error
                names it. "metrics" become a list, as in `concat`.
        """
        self.check_consistency()
        other.check_consistency()
        if not self._is_bare() and not other._is_bare() and len(self) != len(other):
            raise ValueError(f"expected batches of equally many rows, got {len(self)} and {len(other)}")
        mine, theirs = ({**part._tensors(), **part.non_tensor_batch} for part in (self, other))
        for name in mine.keys() & theirs.keys():
            if not same(mine[name], theirs[name]):
                raise ValueError(f"column {name!r} is in both batches with different values; pop or rename one of them")
        meta = merge_meta([self.meta_info, other.meta_info])
        has_tensors = self.batch is not None or other.batch is not None
        tensors = {**self._tensors(), **other._tensors()} if has_tensors else None
        num_rows = len(other) if self._is_bare() else len(self)
        return self._of(num_rows, tensors, {**self.non_tensor_batch, **other.non_tensor_batch}, meta)

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """The rows of all parts, in order.

        Of meta_info, a key keeps its value where all parts that have it agree; "metrics" becomes a list of all parts'.

        Raises:
            ValueError: no parts, a column that not all parts have, or that differs in kind, dtype, device or row shape,
                or a fact that differs; the error names it.
        """
        if len(data) == 0:
            raise ValueError("expected at least one part to concatenate")
        for part in data:
            part.check_consistency()
        tensors = cols.join_tensors([part._tensors() for part in data])
        arrays = cols.join_arrays([part.non_tensor_batch for part in data])
        meta = merge_meta([part.meta_info for part in data])
        num_rows = sum(len(part) for part in data)
        has_tensors = any(part.batch is not None for part in data)
        return type(data[0])._of(num_rows, tensors if has_tensors else None, arrays, meta)

    def to(self, device: torch.device | str) -> "DataProto":
        """A batch with its tensors on `device`; those that are there already are shared."""
        return self._map_tensors(lambda tensor: tensor.to(device))

    def clone(self) -> "DataProto":
        """A batch with its own memory for tensors and numpy columns; the objects in object columns are shared."""
        new = self._map_tensors(lambda tensor: tensor.clone())
        new.non_tensor_batch = {name: array.copy() for name, array in self.non_tensor_batch.items()}
        return new

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}({len(self)} rows, {cols.size_text(self._num_bytes())}"]
        lines += [f"  {name}: {cols.tensor_kind(column)}" for name, column in self._tensors().items()]
        lines += [f"  {name}: {cols.array_kind(array)}, numpy" for name, array in self.non_tensor_batch.items()]
        lines += [f"  meta_info: {', '.join(map(str, self.meta_info))}"] if self.meta_info else []
        return "\n".join(lines) + ")"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self.check_consistency()
        packed = None if self.batch is None else wire.pack_tensors(self._tensors(), protocol)
        return _unpickle, (type(self), len(self), packed, self.non_tensor_batch, self.meta_info)

    def _tensors(self) -> dict[str, Any]:
        return {} if self.batch is None else dict(self.batch.items())

    def _is_bare(self) -> bool:
        return self.batch is None and not self.non_tensor_batch

    def _num_bytes(self) -> int:
        size = sum(array.nbytes for array in self.non_tensor_batch.values())
        for column in self._tensors().values():
            size += (column.values() if column.is_nested else column).nbytes
        return size

    def _map_tensors(self, move: Any) -> "DataProto":
        self.check_consistency()
        tensors = None if self.batch is None else cols.move_tensors(self._tensors(), move)
        return self._of(len(self), tensors, dict(self.non_tensor_batch), self.meta_info)

    def _take(self, index: Tensor) -> "DataProto":
        tensors = None if self.batch is None else cols.take_tensors(self._tensors(), index)
        rows = index.numpy()
        arrays = {name: array[rows] for name, array in self.non_tensor_batch.items()}
        return self._of(index.shape[0], tensors, arrays, self.meta_info)

    def _cut(self, bounds: Sequence[int]) -> list["DataProto"]:
        self.check_consistency()
        arrays = cols.cut_arrays(self.non_tensor_batch, bounds)
        counts = [end - start for start, end in pairwise(bounds)]
        if self.batch is None:
            return [self._of(n, None, part, self.meta_info) for n, part in zip(counts, arrays, strict=True)]
        tensors = cols.cut_tensors(self._tensors(), bounds)
        parts = zip(counts, tensors, arrays, strict=True)
        return [self._of(n, tensor_part, array_part, self.meta_info) for n, tensor_part, array_part in parts]

    def _pick(
        self,
        batch_keys: Sequence[str] | None,
        non_tensor_batch_keys: Sequence[str] | None,
        meta_info_keys: Sequence[str] | None,
    ) -> tuple[dict[str, Tensor], dict[str, np.ndarray], dict[str, Any]]:
        return (
            checks.pick(self._tensors(), batch_keys, "tensor column"),
            checks.pick(self.non_tensor_batch, non_tensor_batch_keys, "non-tensor column"),
            checks.pick(self.meta_info, meta_info_keys, "meta_info key"),
        )


def _unpickle(
    cls: type[DataProto], num_rows: int, packed: Any, arrays: dict[str, np.ndarray], meta_info: dict[str, Any]
) -> DataProto:
    return cls._of(num_rows, None if packed is None else wire.unpack_tensors(*packed), arrays, meta_info)
