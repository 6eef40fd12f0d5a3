"""Splits the arguments of a call into the arguments of each shard's call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

from tidemill_dispatch.batch import is_batch, split_rows, take_rows
from tidemill_dispatch.rows import balanced_lengths

RankCall = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one rank's call. An object that several ranks receive is sent once."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Marks an argument that is split by rows although it is not a batch: a list, array, tensor or TensorDict."""

    value: Any


@dataclass(frozen=True, slots=True)
class Replicate:
    """Marks an argument that is sent whole to every rank although it is a batch."""

    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Pair of functions that makes shards equally long, for example `pad_dataproto_to_divisor` and `unpad_dataproto`.

    Each worker pads its shard before the method runs and removes the padding from the result, so padding rows are never
    sent between processes.

    Attributes:
        pad: `(batch, divisor)` -> `(batch with padding rows at its end, number of padding rows)`.
        unpad: `(batch, number of padding rows at its end)` -> batch without them.
    """

    pad: Callable[[Any, int], tuple[Any, int]]
    unpad: Callable[[Any, int], Any]


class DeferredRows(ABC):
    """A batch that other workers still compute: the base class of futures that can be arguments."""

    @abstractmethod
    def chunk(self, n: int) -> list["DeferredShard"]:
        """Return n shards in row order. Their lengths differ by at most one, the longer ones first."""


@dataclass(frozen=True, slots=True, eq=False)
class DeferredShard:
    """Shard `index` of n of a batch that is not computed yet.

    Attributes:
        num_real: expected number of rows, known if the call has other batches.
        padded: whether the worker pads the shard to the length of the longest.
    """

    source: DeferredRows
    index: int
    n: int
    num_real: int | None = None
    padded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PaddedShard:
    """A shard that its worker pads to `num_rows` rows.

    Attributes:
        rows: `num_real` rows; if that is 0, one row to make padding from.
        num_real: number of rows without padding.
        num_rows: number of rows with padding.
    """

    rows: Any
    num_real: int
    num_rows: int

    def pad(self, padding: Padding) -> Any:
        """Return the shard with padding.

        Raises:
            ValueError: `padding.pad` returned another number of rows than `num_rows`.
        """
        if self.num_real == self.num_rows:
            return self.rows
        if self.num_real > 0:
            padded, _ = padding.pad(self.rows, self.num_rows)
        else:  # one real row and the padding after it
            more, _ = padding.pad(self.rows, self.num_rows + 1)
            padded = take_rows(more, 1, self.num_rows + 1)
        if len(padded) != self.num_rows:
            raise ValueError(
                f"Padding.pad must add the fewest rows that make {max(self.num_real, 1)} rows a multiple of "
                f"{self.num_rows}, got {len(padded)} rows"
            )
        return padded

    def unpad(self, result: Any, padding: Padding) -> Any:
        """Return the method's result without padding. The method may already have removed it.

        Raises:
            ValueError: the result is a batch with another number of rows than the shard, so that the padding rows are
                unknown.
        """
        if self.num_real == self.num_rows or not is_batch(result) or len(result) in (0, self.num_real):
            return result
        if len(result) != self.num_rows:
            raise ValueError(
                f"a method registered with padding received {self.num_rows} rows, {self.num_real} of them real, and "
                f"returned {len(result)} rows; it must return all rows, the real rows, no rows, or no batch"
            )
        return padding.unpad(result, self.num_rows - self.num_real)


@runtime_checkable
class _SupportsRows(Protocol):
    def __getitem__(self, rows: slice, /) -> Any: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Split:
    """The n parts of one argument; `lengths` is None for a batch that is not computed yet."""

    parts: Sequence[Any]
    lengths: tuple[int, ...] | None


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any], n: int, padding: Padding | None = None) -> list[RankCall]:
    """Split the batches among the arguments of a call into n parts; each part has all other arguments unchanged.

    `Shard` and `Replicate` override which arguments are split. Rows that do not divide by n are split unequally. With
    `padding`, the workers pad such shards to equal length.

    Raises:
        ValueError: two batches of the call have different numbers of rows, or split differently.
        TypeError: a `Shard` of a value without rows, or without slices.
    """
    named = {
        **{f"argument {i}": arg for i, arg in enumerate(args)},
        **{f"argument {k!r}": v for k, v in kwargs.items()},
    }
    splits = {name: split for name, value in named.items() if (split := _split(name, value, n)) is not None}
    lengths = _agreed_lengths(splits)
    parts = {name: _shards_to_send(name, named[name], split, lengths, padding) for name, split in splits.items()}

    def pick(name: str, value: Any, index: int) -> Any:
        if name in parts:
            return parts[name][index]
        return value.value if isinstance(value, Replicate) else value

    return [
        (
            tuple(pick(f"argument {i}", arg, index) for i, arg in enumerate(args)),
            {key: pick(f"argument {key!r}", value, index) for key, value in kwargs.items()},
        )
        for index in range(n)
    ]


def _split(name: str, value: Any, n: int) -> _Split | None:
    rows = value.value if isinstance(value, Shard) else value
    if isinstance(rows, DeferredRows):
        return _Split(rows.chunk(n), None)
    if is_batch(rows):
        parts = split_rows(rows, n)
        return _Split(parts, tuple(len(part) for part in parts))
    if not isinstance(value, Shard):
        return None
    if not isinstance(rows, _SupportsRows) or isinstance(rows, str | bytes | dict):
        raise TypeError(
            f"{name} is Shard({type(rows).__name__}), which has no rows; expected a batch, a future of a batch, or a "
            "value with a length and slices (list, array, tensor)"
        )
    try:
        lengths = balanced_lengths(len(rows), n)
        parts = [rows[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
    except Exception as error:  # of the value's type: a tensor without dimensions, or a nested tensor
        raise TypeError(
            f"{name} is Shard({type(rows).__name__}), which cannot be split by rows: {error}; make it a column of a "
            "batch, or pass a list of its rows"
        ) from error
    return _Split(parts, tuple(lengths))


def _agreed_lengths(splits: dict[str, _Split]) -> tuple[int, ...] | None:
    known = {name: split.lengths for name, split in splits.items() if split.lengths is not None}
    if len({sum(lengths) for lengths in known.values()}) > 1:
        rows = ", ".join(f"{name}: {sum(lengths)}" for name, lengths in known.items())
        raise ValueError(
            f"all batches of a call must have the same number of rows; got {rows}; "
            "use Replicate(x) for a batch that goes whole to every rank"
        )
    if len(set(known.values())) > 1:
        rows = ", ".join(f"{name}: {list(lengths)}" for name, lengths in known.items())
        raise ValueError(
            f"all batches of a call must split into parts of the same lengths; got {rows}; check their chunk methods"
        )
    return next(iter(known.values()), None)


def _shards_to_send(
    name: str, value: Any, split: _Split, lengths: tuple[int, ...] | None, padding: Padding | None
) -> Sequence[Any]:
    """Return the parts in the form in which they are sent: a `PaddedShard` if the worker has to pad it."""
    if split.lengths is None:
        known = [None] * len(split.parts) if lengths is None else lengths
        return [
            replace(part, num_real=num_real, padded=padding is not None)
            for part, num_real in zip(split.parts, known, strict=True)
        ]
    if padding is None or len(set(split.lengths)) == 1:
        return split.parts
    rows = value.value if isinstance(value, Shard) else value
    if not is_batch(rows):
        raise ValueError(
            f"{name} has {sum(split.lengths)} rows, which do not divide into {len(split.parts)} shards of equal "
            "length, and only batches can be padded; pad it before the call, or make it a column of the batch"
        )
    num_rows = max(split.lengths)
    last_row = take_rows(rows, len(rows) - 1, len(rows)) if 0 in split.lengths else None
    return [
        PaddedShard(part if num_real > 0 else last_row, num_real, num_rows)
        for part, num_real in zip(split.parts, split.lengths, strict=True)
    ]


def without_wrapper(value: Any) -> Any:
    """Return an argument of a mode that splits nothing, without its `Replicate`.

    Raises:
        TypeError: the argument is a `Shard`.
    """
    if isinstance(value, Shard):
        raise TypeError(
            f"Shard({type(value.value).__name__}) requires a mode that splits batches, split_over(mesh) or "
            "split_over_ranks(); pass the value itself to send it whole"
        )
    return value.value if isinstance(value, Replicate) else value
