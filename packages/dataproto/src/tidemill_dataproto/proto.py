"""The batch container."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tidemill_dataproto import groups
from tidemill_dataproto.columns import checks, tensor_columns
from tidemill_dataproto.columns.equality import same
from tidemill_dataproto.items import DataProtoItem
from tidemill_dataproto.iterator import BatchIterator
from tidemill_dataproto.merging import MergeRule, join_columns, merge_meta
from tidemill_dataproto.ragged.index import as_counts, as_row_index
from tidemill_dataproto.storage import BatchStorage

__all__ = ["DataProto"]


class DataProto(BatchStorage):
    """Rows of a batch: tensor columns, numpy columns, and values about the whole batch.

    Attributes:
        batch: a TensorDict of the tensor columns, dense `[B, ...]` or ragged `[B, j, ...]` (see
            `tidemill_dataproto.ragged`).
        non_tensor_batch: numpy columns, numbers or strings `[B, ...]`, or objects `[B]`. An object column has one dim,
            whatever its objects are; `from_dict` makes one of any list.
        meta_info: values that are not per row. Every batch has its own deep copy.

    Operations return a new batch and do not change their inputs, except `pop`. `chunk`, `split`, slices with step 1,
    `select` and `rename` share memory with their input; index, mask, `concat`, `reorder` and `repeat` copy. Objects in
    object columns are always shared.

    Rows added by `pad_dataproto_to_divisor` stay marked in all operations. Iteration skips them, `concat` drops them,
    all other operations treat them as rows.

    A batch pickles its tensors as buffers, on the CPU. After unpickling from shared memory, as in Ray, tensors are
    views of that memory: call `clone()` before writing in place (workers of tidemill-dispatch receive clones).
    `copy.deepcopy` copies objects too, and tensors as `clone` does: on their device, with gradients that flow back to
    the original.
    """

    __slots__ = ()

    def __getitem__(self, item: Any) -> Any:
        """Return a column by name (str), one row as a DataProtoItem (int), or rows as a batch.

        Rows are a slice, list of rows, bool mask, int tensor or array; negative rows count from the end.

        Raises:
            KeyError: an unknown column; the error lists the known ones.
            TypeError, ValueError: not a valid row index.
            IndexError: a row out of range.
        """
        columns = self._read()
        if isinstance(item, str):
            if item in columns:
                return tensor_columns.as_tensor(columns[item])
            checks.check_known("column", [item], [*columns, *self.non_tensor_batch])
            return self.non_tensor_batch[item]
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            row = int(as_row_index([item], len(self))[0])
            return DataProtoItem.of_row(columns, self.non_tensor_batch, self.meta_info, row)
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            if step == 1:
                return self._cut([start, max(start, stop)])[0]
            return self._take(np.arange(start, stop, step))
        return self.select_idxs(item)

    def __iter__(self) -> Iterator[DataProtoItem]:
        """Yield the rows that are not padding."""
        for row in np.flatnonzero(~self.is_padding):
            yield self[int(row)]

    def select_idxs(self, idxs: Any) -> "DataProto":
        """Copy the rows `idxs`: integers (negative ones count from the end) or a bool mask; list, tensor or array."""
        return self._take(as_row_index(idxs, len(self)))

    def reorder(self, indices: Any) -> "DataProto":
        """Return the rows in the order `indices`, a permutation of 0..B-1 (ValueError otherwise)."""
        rows = as_row_index(indices, len(self))
        if not np.array_equal(np.sort(rows), np.arange(len(self))):
            raise ValueError(
                f"expected a permutation of {len(self)} rows, got repeated or missing rows; use select_idxs() to drop "
                f"or repeat them"
            )
        return self._take(rows)

    def repeat(self, repeat_times: int, interleave: bool = True) -> "DataProto":
        """Repeat each row `repeat_times` times, next to each other (0 0 1 1), or the whole batch (0 1 0 1).

        Raises:
            ValueError: repeat_times < 0.
            TypeError: repeat_times is not an integer; `sample_level_repeat` takes one number per row.
        """
        if not isinstance(repeat_times, int | np.integer):
            raise TypeError(
                f"expected repeat_times as an integer, got {type(repeat_times).__name__}; use sample_level_repeat() "
                f"for one number per row"
            )
        if repeat_times < 0:
            raise ValueError(f"expected repeat_times >= 0, got {repeat_times}")
        rows = np.arange(len(self))
        return self._take(rows.repeat(repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | np.ndarray) -> "DataProto":
        """Repeat row i `repeat_times[i]` times, next to each other; 0 drops the row.

        Raises:
            TypeError: not integers.
            ValueError: not one number per row, or a negative one.
        """
        counts = as_counts(repeat_times, len(self), "repeat_times")
        return self._take(np.arange(len(self)).repeat(counts))

    def chunk(self, chunks: int, allow_unequal: bool = False) -> list[Self]:
        """Cut into `chunks` batches of neighbouring rows.

        With allow_unequal, the first B % chunks parts have one row more than the others; with fewer rows than chunks,
        the last parts are empty.

        Raises:
            ValueError: chunks < 1, or it does not divide the number of rows and allow_unequal is False.
        """
        if chunks < 1:
            raise ValueError(f"expected at least one chunk, got chunks={chunks}")
        size, more = divmod(len(self), chunks)
        if more and not allow_unequal:
            raise ValueError(
                f"{len(self)} rows do not divide into {chunks} equal chunks; pass allow_unequal=True, or call "
                f"pad_dataproto_to_divisor() first"
            )
        return self._cut([part * size + min(part, more) for part in range(chunks + 1)])

    def split(self, split_size: int) -> list[Self]:
        """Cut into batches of `split_size` rows, the last one shorter; zero rows into one batch of zero rows."""
        if split_size < 1:
            raise ValueError(f"expected split_size >= 1, got {split_size}")
        return self._cut([*range(0, max(len(self), 1), split_size), len(self)])

    def make_iterator(
        self, mini_batch_size: int, epochs: int = 1, seed: int | None = None, shuffle: bool = True
    ) -> BatchIterator["DataProto"]:
        """Yield every row that is not padding once per epoch, in batches of `mini_batch_size`, the last one shorter.

        The order of an epoch depends only on seed and epoch; without a seed, one is drawn from torch's CPU generator.
        The iterator resumes at any position with its `state_dict()` and `load_state_dict()`. Zero rows yield nothing.

        Args:
            mini_batch_size: rows per batch.
            epochs: number of epochs.
            seed: seed of the order.
            shuffle: whether to shuffle; if not, rows keep their order.
        """
        if mini_batch_size < 1 or epochs < 0:
            raise ValueError(f"expected mini_batch_size >= 1 and epochs >= 0, got {mini_batch_size} and {epochs}")
        self.check_consistency()
        if shuffle and seed is None:
            seed = int(torch.randint(2**31, ()))
        rows = np.flatnonzero(~self.is_padding)
        return BatchIterator(self._take, rows, mini_batch_size, epochs, seed if shuffle else None)

    def fold(self, group_size: int) -> "DataProto":
        """Make one row of every `group_size` neighbouring rows; `unfold` is the inverse.

        Dense columns become `[B / group_size, group_size, ...]`, object columns lists of objects. A ragged column has
        the rows of a group one after another, and a numpy column `<name>.lengths` has their lengths.

        Raises:
            ValueError: group_size does not divide the number of rows, or some are padding.
        """
        self._check_unpadded()
        return self._of(*groups.fold(self._read(), self.non_tensor_batch, len(self), group_size), self.meta_info)

    def _check_unpadded(self) -> None:
        if self._num_padding() > 0:
            raise ValueError(
                f"expected a batch without padding, got {self._num_padding()} padding rows; call unpad_dataproto() "
                f"first"
            )

    def unfold(self) -> "DataProto":
        """Split folded rows into the original rows.

        Raises:
            ValueError: a column that is not folded, or into another group size (the error names it), or padding rows.
        """
        self._check_unpadded()
        return self._of(*groups.unfold(self._read(), self.non_tensor_batch, len(self)), self.meta_info)

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] = ()) -> "DataProto":
        """Split each row into `n_split` rows: columns `split_keys` are cut along dim 1, all others are repeated.

        A dense or numpy column `[B, n_split * T, ...]` becomes `[B * n_split, T, ...]`; a row of a ragged column, or a
        list in an object column, is cut into `n_split` runs of equal length.

        Raises:
            KeyError: an unknown name in split_keys.
            ValueError: n_split < 1, or a column or row that does not divide; the error names it.
        """
        columns, arrays = self._read(), self.non_tensor_batch
        checks.check_known("column", split_keys, [*columns, *arrays])
        if n_split < 1:
            raise ValueError(f"expected n_split >= 1, got {n_split}")
        whole = self.select(
            [name for name in columns if name not in split_keys], [name for name in arrays if name not in split_keys]
        ).repeat(n_split)
        cut_columns, cut_arrays = groups.split_rows(columns, arrays, n_split, split_keys)
        columns = {name: (cut_columns | whole._read())[name] for name in columns}
        arrays = {name: (cut_arrays | whole.non_tensor_batch)[name] for name in arrays}
        return self._of(len(whole), columns, arrays, self.meta_info, whole._padding)

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Return a batch of the named columns and items of meta_info; None means all. KeyError for an unknown name."""
        columns, arrays, meta = self._pick(batch_keys, non_tensor_batch_keys, meta_info_keys)
        return self._of(len(self), columns, arrays, meta, self._padding)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Move the named columns and items of meta_info from this batch to a new one; None means none of them.

        `batch.batch` is a new TensorDict afterwards. Raises KeyError for an unknown name before anything is moved.
        """
        keys = [() if keys is None else keys for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        columns, arrays, meta = self._pick(*keys)
        rest = {name: column for name, column in self._read().items() if name not in columns}
        others = {name: array for name, array in self.non_tensor_batch.items() if name not in arrays}
        num_rows = len(self)
        popped = self._of(num_rows, columns, arrays, meta, self._padding)
        self._tensors = self._of(num_rows, rest, others, {})._tensors
        for name in arrays:
            del self.non_tensor_batch[name]
        for key in meta:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Return a batch with new names for some tensor or numpy columns.

        Raises:
            KeyError: an unknown old name.
            ValueError: different numbers of old and new names, or a new name is in use.
        """
        old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
        columns = self._read()
        names = [*columns, *self.non_tensor_batch]
        checks.check_known("column", old, names)
        if len(old) != len(new):
            raise ValueError(f"expected the same number of old and new names, got {old} and {new}")
        to = dict(zip(old, new, strict=True))
        renamed = [to.get(name, name) for name in names]
        if len(set(renamed)) != len(names) or len(to) != len(old):
            raise ValueError(f"renaming {old} to {new} would give two columns one name; the columns are {names}")
        columns = {to.get(name, name): column for name, column in columns.items()}
        arrays = {to.get(name, name): column for name, column in self.non_tensor_batch.items()}
        return self._of(len(self), columns, arrays, self.meta_info, self._padding)

    def union(self, other: "DataProto", merge: Mapping[str, MergeRule] | None = None) -> "DataProto":
        """Return a batch with the columns and meta_info of both; rows that are padding in one are padding.

        `merge` and its defaults are those of `concat`.

        Raises:
            ValueError: different numbers of rows, or a column or item of meta_info with different values in both; the
                error names it.
        """
        checks.check_type(other, DataProto, "a DataProto")
        columns, others = self._read(), other._read()
        if not self._is_bare() and not other._is_bare() and len(self) != len(other):
            raise ValueError(f"expected batches with the same number of rows, got {len(self)} and {len(other)}")
        mine, theirs = {**columns, **self.non_tensor_batch}, {**others, **other.non_tensor_batch}
        for name in mine.keys() & theirs.keys():
            if not same(mine[name], theirs[name]):
                raise ValueError(f"column {name!r} has different values in the two batches; pop or rename one of them")
        padding = self._padding if other._padding is None else other._padding
        if padding is not None and self._padding is not None and not np.array_equal(self._padding, padding):
            raise ValueError("expected the same padding rows in both batches; call unpad_dataproto() on them first")
        weights = [len(batch) - batch._num_padding() for batch in (self, other)]
        meta = merge_meta([self.meta_info, other.meta_info], merge, weights)
        num_rows = len(other) if self._is_bare() else len(self)
        arrays = {**self.non_tensor_batch, **other.non_tensor_batch}
        return self._of(num_rows, tensor_columns.union(columns, others), arrays, meta, padding)

    @staticmethod
    def concat(
        data: Sequence["DataProto"],
        fill: Mapping[str, Any] | None = None,
        merge: Mapping[str, MergeRule] | None = None,
    ) -> "DataProto":
        """Concatenate the rows of all parts, in order, without padding rows.

        Args:
            data: the parts; one without columns and rows matches any other.
            fill: value of the missing rows for columns that only some parts have; None for a ragged column, whose rows
                are then empty. A fill for a column that all parts have is ignored.
            merge: rule by key of meta_info: "first", "list" (of the values of all parts, in order), "sum", "mean"
                (weighted by rows without padding), "max" or "min" of numbers or of each number in a dict, or a function
                of the list of values. Without a rule, "metrics" and "timing" become a list, and all other values must
                be equal in all parts that have the key.

        Raises:
            ValueError: no parts; a column that some parts lack and `fill` does not name, or that differs in kind,
                dtype, device or row shape; a fill that its column cannot represent, or for an unknown column; or a
                value of meta_info that differs. The error names the column or key.
        """
        if len(data) == 0:
            raise ValueError("expected at least one part to concatenate, got an empty list")
        for number, part in enumerate(data):
            checks.check_type(part, DataProto, f"a list of DataProto, part {number} of it")
        parts = [part if part._num_padding() == 0 else part.without_padding() for part in data]
        return data[0]._join(parts, {} if fill is None else fill, merge)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "DataProto":
        """Return a batch with its tensors on `device`; tensors already there are shared. See `Tensor.to`.

        Args:
            non_blocking: do not wait for the work in the queue of a GPU; CPU tensors go through pinned memory.
        """
        columns = tensor_columns.to_device(self._read(), torch.device(device), non_blocking=non_blocking)
        return self._of(len(self), columns, dict(self.non_tensor_batch), self.meta_info, self._padding)

    def clone(self) -> "DataProto":
        """Return a batch with its own memory for tensors and numpy columns; objects are shared."""
        columns = tensor_columns.map_tensors(self._read(), lambda tensor: tensor.clone())
        arrays = {name: array.copy() for name, array in self.non_tensor_batch.items()}
        return self._of(len(self), columns, arrays, self.meta_info, self._padding)

    @staticmethod
    def _join(
        parts: Sequence["DataProto"], fill: Mapping[str, Any], merge: Mapping[str, MergeRule] | None
    ) -> "DataProto":
        """`concat` that keeps padding."""
        full = [part for part in parts if not part._is_bare()]
        counts = [len(part) for part in full]
        columns, arrays = {}, {}
        if full:
            arrays = [part.non_tensor_batch for part in full]
            columns, arrays = join_columns([part._read() for part in full], arrays, counts, fill)
        meta = merge_meta(
            [part.meta_info for part in parts], merge, [len(part) - part._num_padding() for part in parts]
        )
        padding = None
        if any(part._padding is not None for part in full):
            padding = np.concatenate([part.is_padding for part in full])
        return type(parts[0])._of(sum(counts), columns, arrays, meta, padding)
