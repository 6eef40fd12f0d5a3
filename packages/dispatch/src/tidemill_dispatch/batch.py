"""What a batch is, and how its rows are split and joined."""

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Protocol, overload, runtime_checkable

from tidemill_dispatch.rows import balanced_lengths


@runtime_checkable
class Batch(Protocol):
    """A value with rows. `tidemill_dataproto.DataProto` and `ListBatch` are batches; tensors and lists are not.

    `chunk(n)` returns n parts in row order, `concat(parts)` is its inverse (a static or class method), and `len` is
    the number of rows. Three optional members:

    - A keyword `allow_unequal` of `chunk`: it is then called as `chunk(n, allow_unequal=True)`. For types whose `chunk`
      rejects rows that do not divide by n by default.
    - A method `without_padding()`: it is called on results, to remove rows that the worker marked as padding.
    - A method `clone()`: it is called on what a worker receives, for types whose memory other ranks may share.
    """

    def chunk(self, n: int, /) -> Sequence[Any]: ...

    def concat(self, parts: list[Any], /) -> Any: ...

    def __len__(self) -> int: ...


def is_batch(value: Any) -> bool:
    """Return `isinstance(value, Batch)`, cached by type: it takes 10 us and runs dozens of times in a call."""
    return _is_batch_type(type(value))


@lru_cache(maxsize=256)
def _is_batch_type(kind: type) -> bool:
    return issubclass(kind, Batch)


@runtime_checkable
class _SupportsSlices(Protocol):
    def __getitem__(self, rows: slice, /) -> Any: ...


@runtime_checkable
class _SupportsPadding(Protocol):
    def without_padding(self) -> Any: ...


@runtime_checkable
class _SupportsClone(Protocol):
    def clone(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ListBatch:
    """A list whose items are rows, for batches of plain Python objects.

    >>> [part.items for part in ListBatch([1, 2, 3]).chunk(2)]
    [[1, 2], [3]]
    """

    items: list[Any]

    def chunk(self, n: int) -> list["ListBatch"]:
        """Split into n parts in order. Their lengths differ by at most one, the longer ones first."""
        if n < 1:
            raise ValueError(f"chunk(n) requires n >= 1, got {n}")
        ends = accumulate(balanced_lengths(len(self.items), n), initial=0)
        return [ListBatch(self.items[start:stop]) for start, stop in pairwise(ends)]

    @staticmethod
    def concat(parts: list["ListBatch"]) -> "ListBatch":
        """Join parts in order."""
        return ListBatch([item for part in parts for item in part.items])

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, rows: int) -> Any: ...

    @overload
    def __getitem__(self, rows: slice) -> "ListBatch": ...

    def __getitem__(self, rows: int | slice) -> Any:
        return ListBatch(self.items[rows]) if isinstance(rows, slice) else self.items[rows]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@lru_cache(maxsize=256)
def _has_allow_unequal(batch_type: type) -> bool:
    return "allow_unequal" in inspect.signature(batch_type.chunk).parameters  # pyright: ignore


def split_rows(batch: Batch, n: int) -> list[Any]:
    """Split `batch` into exactly n parts in row order, of unequal length where the rows do not divide.

    Raises:
        ValueError: `chunk` of the batch did not return n parts that hold all rows.
    """
    chunk: Any = batch.chunk
    parts = list(chunk(n, allow_unequal=True) if _has_allow_unequal(type(batch)) else chunk(n))
    lengths = [len(part) for part in parts]
    if len(parts) != n or sum(lengths) != len(batch):
        raise ValueError(
            f"{type(batch).__name__}.chunk({n}) of {len(batch)} rows returned {len(parts)} parts of {lengths} rows; "
            f"it must return {n} parts with {len(batch)} rows in total (parts may be empty)"
        )
    return parts


def take_rows(batch: Batch, start: int, stop: int) -> Any:
    """Return rows `start` to `stop`: by slicing if the batch supports it, else by `chunk` and `concat`."""
    if (start, stop) == (0, len(batch)):
        return batch
    if isinstance(batch, _SupportsSlices):
        return batch[start:stop]
    if start == stop:
        return split_rows(batch, len(batch) + 1)[-1]
    step = math.gcd(len(batch), start, stop)
    parts = split_rows(batch, len(batch) // step)[start // step : stop // step]
    return parts[0] if len(parts) == 1 else type(batch).concat(parts)  # pyright: ignore[reportCallIssue]


def without_padding(result: Any) -> Any:
    """Return a worker's result without the rows that it marked as padding, if it is a batch."""
    return result.without_padding() if is_batch(result) and isinstance(result, _SupportsPadding) else result


def own_copy(value: Any) -> Any:
    """Return a copy of a batch whose type has `clone`, and other values unchanged.

    A worker may write into its arguments. Tensors in shared memory are writable, and other ranks and calls read them.
    """
    return value.clone() if has_clone(value) else value


def has_clone(value: Any) -> bool:
    """Return whether a value is a batch whose type has `clone`."""
    return is_batch(value) and isinstance(value, _SupportsClone)


def join_results(results: list[Any]) -> Any:
    """Concatenate results that are batches; return other results as the list.

    Raises:
        TypeError: some results are batches and some are not, or they are batches of different types.
        ValueError: `concat` of the batches raised.
    """
    batches = [is_batch(result) for result in results]
    if not any(batches):
        return results
    types = [type(result) for result in results]
    if not all(batches) or len(set(types)) > 1:
        names = [kind.__name__ for kind in types]
        raise TypeError(
            f"results must be batches of one type on every dp rank, or no batch on any; got {names} in dp order"
        )
    try:
        return types[0].concat(results)
    except Exception as error:
        raise ValueError(
            f"results of type {types[0].__name__} with {[len(part) for part in results]} rows, in dp order, cannot be "
            f"concatenated: {error}; a group calls concat without options, so return the same columns, and meta_info "
            "that can be joined, on every dp rank"
        ) from error
