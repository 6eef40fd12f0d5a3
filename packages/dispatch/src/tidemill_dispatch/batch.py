"""What counts as a batch, and how its rows are split and put together again."""

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
    """Anything with rows. `tidemill_dataproto.DataProto` and `ListBatch` are batches; tensors and lists are not.

    `chunk(n)` returns n parts in row order, `concat(parts)` is its inverse (a static or class method), and `len` is
    the number of rows. A type whose `chunk` refuses rows that do not divide by n unless asked says so by a keyword
    `allow_unequal`; it is then called as `chunk(n, allow_unequal=True)`. A type whose rows can be marked as padding has
    a method `without_padding()`, which is called on what workers return.
    """

    def chunk(self, n: int, /) -> Sequence[Any]: ...

    def concat(self, parts: list[Any], /) -> Any: ...

    def __len__(self) -> int: ...


def is_batch(value: Any) -> bool:
    """`isinstance(value, Batch)`, which takes 10 us and is asked dozens of times in a call, by the value's type."""
    return _is_batch_type(type(value))


@lru_cache(maxsize=256)
def _is_batch_type(kind: type) -> bool:
    return issubclass(kind, Batch)


@runtime_checkable
class _Sliceable(Protocol):
    def __getitem__(self, rows: slice, /) -> Any: ...


@runtime_checkable
class _MarksPadding(Protocol):
    def without_padding(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ListBatch:
    """A list whose items are rows, for calls that carry plain Python objects.

    >>> [part.items for part in ListBatch([1, 2, 3]).chunk(2)]
    [[1, 2], [3]]
    """

    items: list[Any]

    def chunk(self, n: int) -> list["ListBatch"]:
        """Splits into n parts in order, whose lengths differ by at most one (the longer ones first)."""
        if n < 1:
            raise ValueError(f"a ListBatch is split into at least 1 part, not {n}")
        ends = accumulate(balanced_lengths(len(self.items), n), initial=0)
        return [ListBatch(self.items[start:stop]) for start, stop in pairwise(ends)]

    @staticmethod
    def concat(parts: list["ListBatch"]) -> "ListBatch":
        """Joins parts in order."""
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
def _asks_for_unequal(batch_type: type) -> bool:
    return "allow_unequal" in inspect.signature(batch_type.chunk).parameters  # pyright: ignore


def split_rows(batch: Batch, n: int) -> list[Any]:
    """Splits `batch` into exactly n parts in row order, of unequal length where the rows do not divide.

    Raises:
        ValueError: the batch's own `chunk` did not return n parts that hold all rows.
    """
    chunk: Any = batch.chunk
    parts = list(chunk(n, allow_unequal=True) if _asks_for_unequal(type(batch)) else chunk(n))
    lengths = [len(part) for part in parts]
    if len(parts) != n or sum(lengths) != len(batch):
        raise ValueError(
            f"{type(batch).__name__}.chunk({n}) of {len(batch)} rows returned {len(parts)} parts of {lengths} rows; "
            f"expected {n} parts of {len(batch)} rows in all"
        )
    return parts


def take_rows(batch: Batch, start: int, stop: int) -> Any:
    """Rows `start` to `stop`: by a slice if the batch has slices, else by `chunk` and `concat`."""
    if (start, stop) == (0, len(batch)):
        return batch
    if isinstance(batch, _Sliceable):
        return batch[start:stop]
    if start == stop:
        return split_rows(batch, len(batch) + 1)[-1]
    step = math.gcd(len(batch), start, stop)
    parts = split_rows(batch, len(batch) // step)[start // step : stop // step]
    return parts[0] if len(parts) == 1 else type(batch).concat(parts)  # pyright: ignore[reportCallIssue]


def real_rows(result: Any) -> Any:
    """A worker's result, without the rows that it has marked as padding if it is a batch."""
    return result.without_padding() if is_batch(result) and isinstance(result, _MarksPadding) else result


def join_results(results: list[Any]) -> Any:
    """Concatenates results that are batches; other results come back as the list that came in.

    Raises:
        TypeError: some results are batches and some are not, or they are batches of different types.
        ValueError: the batches' own `concat` refused them.
    """
    batches = [is_batch(result) for result in results]
    if not any(batches):
        return results
    types = [type(result) for result in results]
    if not all(batches) or len(set(types)) > 1:
        names = [kind.__name__ for kind in types]
        raise TypeError(f"results to concatenate must be batches of one type on every dp rank; got {names} in dp order")
    try:
        return types[0].concat(results)
    except Exception as error:
        raise ValueError(
            f"{types[0].__name__}s of {[len(part) for part in results]} rows, in dp order, cannot be concatenated: "
            f"{error}; return the same columns on every dp rank"
        ) from error
