"""What counts as a batch, and how its rows are split and put together again."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Batch(Protocol):
    """Anything with rows. `tidemill_dataproto.DataProto` and `ListBatch` are batches; tensors and lists are not.

    `chunk(n)` returns n parts in row order, `concat(parts)` is its inverse (a static or class method), and `len` is
    the number of rows. A type whose `chunk` refuses rows that do not divide by n unless asked says so by a keyword
    `allow_unequal`; it is then called as `chunk(n, allow_unequal=True)`.
    """

    def chunk(self, n: int, /) -> Sequence[Any]: ...

    def concat(self, parts: list[Any], /) -> Any: ...

    def __len__(self) -> int: ...


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
        share, extra = divmod(len(self.items), n)
        starts = [rank * share + min(rank, extra) for rank in range(n + 1)]
        return [ListBatch(self.items[start:stop]) for start, stop in pairwise(starts)]

    @staticmethod
    def concat(parts: list["ListBatch"]) -> "ListBatch":
        """Joins parts in order."""
        return ListBatch([item for part in parts for item in part.items])

    def __len__(self) -> int:
        return len(self.items)

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


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any], n: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Splits the batches among the arguments of a call into n parts; every part gets all other arguments as they are.

    Raises:
        ValueError: two batches of the call have different numbers of rows.
    """
    named = {
        **{f"argument {i}": arg for i, arg in enumerate(args)},
        **{f"argument {k!r}": v for k, v in kwargs.items()},
    }
    batches = {name: value for name, value in named.items() if isinstance(value, Batch)}
    if len({len(batch) for batch in batches.values()}) > 1:
        rows = ", ".join(f"{name}: {len(batch)}" for name, batch in batches.items())
        raise ValueError(f"the batches of one call must have the same number of rows; got {rows}")
    parts = {name: split_rows(batch, n) for name, batch in batches.items()}

    def pick(name: str, value: Any, index: int) -> Any:
        return parts[name][index] if name in parts else value

    return [
        (
            tuple(pick(f"argument {i}", arg, index) for i, arg in enumerate(args)),
            {key: pick(f"argument {key!r}", value, index) for key, value in kwargs.items()},
        )
        for index in range(n)
    ]


def join_results(results: list[Any]) -> Any:
    """Concatenates results that are batches; other results come back as the list that came in.

    Raises:
        TypeError: some results are batches and some are not, or they are batches of different types.
    """
    is_batch = [isinstance(result, Batch) for result in results]
    if not any(is_batch):
        return results
    types = [type(result) for result in results]
    if not all(is_batch) or len(set(types)) > 1:
        names = [kind.__name__ for kind in types]
        raise TypeError(f"results to concatenate must be batches of one type on every dp rank; got {names} in dp order")
    return types[0].concat(results)
