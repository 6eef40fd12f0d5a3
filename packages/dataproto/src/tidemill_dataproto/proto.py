"""The batch container."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tidemill_dataproto import columns as cols
from tidemill_dataproto import ragged, wire
from tidemill_dataproto.meta import merge_meta, same

__all__ = ["DataProto"]


class DataProto:
    """Rows of one batch: tensor columns, numpy columns, and facts about the whole batch.

    Attributes:
        batch: a TensorDict of the tensor columns, dense `[B, ...]` or ragged `[B, j, ...]` (see
            `tidemill_dataproto.ragged`); None where the batch was made without any.
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
            _check_tensor(name, column)

    @classmethod
    def _of(
        cls,
        num_rows: int,
        tensors: dict[str, Tensor] | None,
        arrays: dict[str, np.ndarray],
        meta_info: Mapping[str, Any],
    ) -> "DataProto":
        """A batch of columns known to be good, with a deep copy of meta_info."""
        new = cls.__new__(cls)
        # The checking constructor of TensorDict takes longer than the row operation, 60 us per ragged column.
        new.batch = None if tensors is None else TensorDict._new_unsafe(tensors, batch_size=torch.Size([num_rows]))
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
        """Makes a batch of tensor columns and other columns (numpy arrays, lists or tuples; lists become object columns).

        Raises:
            ValueError: columns of different length, a name in both halves, or a tensor that is neither dense with at
                least one dim nor jagged with dim 1 ragged; the error names the column.
            TypeError: a column of another type.
        """
        tensors = {} if tensors is None else dict(tensors)
        for name, column in tensors.items():
            if not isinstance(column, Tensor):
                raise TypeError(f"column {name!r}: expected a tensor, got {type(column).__name__}; see non_tensors")
            _check_tensor(name, column)
        arrays = {
            name: _as_array(name, column) for name, column in ({} if non_tensors is None else non_tensors).items()
        }
        counts = {name: column.shape[0] for name, column in [*tensors.items(), *arrays.items()]}
        _check_counts(counts)
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
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(
                    f"column {name!r}: expected a numpy array in non_tensor_batch, got {type(array).__name__}; "
                    f"DataProto.from_dict makes one"
                )
            if array.ndim == 0 or (array.dtype == object and array.ndim != 1):
                raise ValueError(
                    f"column {name!r}: expected one object per row, got {array.dtype} {list(array.shape)}; "
                    f"pass a list to DataProto.from_dict"
                )
            counts[name] = array.shape[0]
        _check_counts(counts)
        both = [] if self.batch is None else [name for name in self.non_tensor_batch if name in self.batch.keys()]
        if both:
            raise ValueError(f"columns {both} are in both halves of the batch; rename or pop one of each")

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
            _check_known("column", [item], [*tensors, *self.non_tensor_batch])
            return self.non_tensor_batch[item]
        if isinstance(item, int | np.integer):
            raise TypeError(
                f"expected rows as slice, list, mask or tensor, got the int {item}; use [{item}:{item + 1}]"
            )
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            if step == 1:
                return self._cut([start, max(start, stop)])[0]
            return self.select_idxs(range(start, stop, step))
        return self.select_idxs(item)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a DataProto is not iterable; use make_iterator(), split() or a column")

    def select_idxs(self, idxs: Any) -> "DataProto":
        """Copies the rows `idxs`: integers (negative ones count from the end) or a bool mask, as list, tensor or array."""
        self.check_consistency()
        return self._take(cols.as_row_index(idxs, len(self)))

    def reorder(self, indices: Any) -> "DataProto":
        """The rows in the order `indices`, a permutation of 0..B-1 (ValueError if it is not one)."""
        self.check_consistency()
        index = cols.as_row_index(indices, len(self))
        if not torch.equal(index.sort().values, torch.arange(len(self))):
            raise ValueError(
                f"expected a permutation of the {len(self)} rows; use select_idxs() to drop or repeat rows"
            )
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
            raise ValueError(
                f"{len(self)} rows do not divide into {chunks} chunks; pass allow_unequal=True or pad first"
            )
        return self._cut([part * size + min(part, more) for part in range(chunks + 1)])

    def split(self, split_size: int) -> list["DataProto"]:
        """Cuts into batches of `split_size` rows, the last with what is left; a batch of zero rows into one of zero rows."""
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
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> "DataProto":
        """Moves the named columns and facts out of this batch into a new one. KeyError, before anything moves, for an
        unknown name."""
        self.check_consistency()
        num_rows = len(self)
        tensors, arrays, meta = self._pick(batch_keys, non_tensor_batch_keys, meta_info_keys)
        if self.batch is not None:
            self.batch = self.batch.exclude(*tensors)
        for name in arrays:
            del self.non_tensor_batch[name]
        for key in meta:
            del self.meta_info[key]
        return self._of(num_rows, tensors if tensors or not arrays else None, arrays, meta)

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
        _check_known("column", old, names)
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
            ValueError: another number of rows, or a column or fact that both have with different values ("metrics" are
                collected, as in `concat`); the error names it.
        """
        self.check_consistency()
        other.check_consistency()
        if not self._is_bare() and not other._is_bare() and len(self) != len(other):
            raise ValueError(f"expected batches of equally many rows, got {len(self)} and {len(other)}")
        mine, theirs = ({**part._tensors(), **part.non_tensor_batch} for part in (self, other))
        for name in mine.keys() & theirs.keys():
            if not same(mine[name], theirs[name]):
                raise ValueError(f"column {name!r} is in both batches with different values; pop or rename one of them")
        both_metrics = "metrics" in self.meta_info and "metrics" in other.meta_info
        meta = merge_meta([self.meta_info, other.meta_info]) if both_metrics else None
        if meta is None:
            metrics = {key: m[key] for m in (self.meta_info, other.meta_info) for key in m if key == "metrics"}
            meta = merge_meta([{k: v for k, v in part.meta_info.items() if k != "metrics"} for part in (self, other)])
            meta.update(metrics)
        has_tensors = self.batch is not None or other.batch is not None
        tensors = {**other._tensors(), **self._tensors()} if has_tensors else None
        num_rows = len(other) if self._is_bare() else len(self)
        return self._of(num_rows, tensors, {**other.non_tensor_batch, **self.non_tensor_batch}, meta)

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
        lines = [f"{type(self).__name__}({len(self)} rows, {_size(self._num_bytes())}"]
        lines += [f"  {name}: {cols.tensor_kind(column)}" for name, column in self._tensors().items()]
        lines += [f"  {name}: {cols.array_kind(array)}, numpy" for name, array in self.non_tensor_batch.items()]
        lines += [f"  meta_info: {', '.join(map(str, self.meta_info))}"] if self.meta_info else []
        return "\n".join(lines) + ")"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self.check_consistency()
        packed = None if self.batch is None else wire.pack_tensors(self._tensors(), protocol)
        return _unpickle, (type(self), len(self), packed, self.non_tensor_batch, self.meta_info)

    def _tensors(self) -> dict[str, Tensor]:
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
            _pick(self._tensors(), batch_keys, "tensor column"),
            _pick(self.non_tensor_batch, non_tensor_batch_keys, "non-tensor column"),
            _pick(self.meta_info, meta_info_keys, "meta_info key"),
        )


def _unpickle(
    cls: type[DataProto], num_rows: int, packed: Any, arrays: dict[str, np.ndarray], meta_info: dict[str, Any]
) -> DataProto:
    return cls._of(num_rows, None if packed is None else wire.unpack_tensors(*packed), arrays, meta_info)


def _pick(source: Mapping[str, Any], keys: Sequence[str] | None, what: str) -> dict[str, Any]:
    if isinstance(keys, str):
        raise TypeError(f"expected a list of names, got the string {keys!r}; write [{keys!r}]")
    names = list(source) if keys is None else list(keys)
    _check_known(what, names, source)
    return {name: source[name] for name in names}


def _check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KeyError(f"no {what} {', '.join(map(repr, unknown))}; there are {known}")


def _check_counts(counts: Mapping[str, int]) -> None:
    if len(set(counts.values())) > 1:
        raise ValueError(f"expected the same number of rows in all columns, got {dict(counts)}")


def _check_tensor(name: str, column: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"expected a column name as a string, got {name!r}")
    if not isinstance(column, Tensor):
        raise TypeError(
            f"column {name!r}: expected a tensor, got {type(column).__name__}; see non_tensors of from_dict"
        )
    if ragged.is_ragged(column):
        offsets = ragged.offsets(column)
        if offsets[0] != 0 or offsets[-1] != column.values().shape[0]:
            raise ValueError(f"column {name!r}: expected offsets from 0 to the number of values; see ragged.ragged()")
    elif column.layout != torch.strided or column.is_nested or column.dim() == 0:
        raise ValueError(
            f"column {name!r}: expected a dense tensor [B, ...] or a jagged one [B, j, ...], got {column.dim()} dims of "
            f"layout {column.layout}{' (nested)' if column.is_nested else ''}; see ragged.ragged() and ragged_from_list()"
        )


def _as_array(name: str, column: Any) -> np.ndarray:
    if isinstance(column, list | tuple):
        return cols.object_column(column)
    if not isinstance(column, np.ndarray) or column.ndim == 0:
        raise TypeError(f"column {name!r}: expected a numpy array or list of rows, got {type(column).__name__}")
    # numpy makes a 2-D object array of lists that happen to be equally long; back to one list per row.
    return cols.object_column(column.tolist()) if column.dtype == object and column.ndim > 1 else column


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
