"""Checks of names, types and row counts, with errors that name the column."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["check_counts", "check_batch_dims", "check_disjoint", "check_fits", "check_known", "check_type", "pick"]


def check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise KeyError for a name that is not among the known ones."""
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KeyError(f"no {what} {', '.join(map(repr, unknown))}; known: {known}")


def pick(source: Mapping[str, Any], keys: Sequence[str] | None, what: str) -> dict[str, Any]:
    """Return the items of `keys`, all if None. KeyError for an unknown name, TypeError for a string."""
    if keys is None:
        return dict(source)
    if isinstance(keys, str):
        raise TypeError(f"expected a list of names, got the string {keys!r}; write [{keys!r}]")
    names = list(keys)
    check_known(what, names, source)
    return {name: source[name] for name in names}


def check_type(value: Any, kind: type, what: str) -> None:
    """Raise TypeError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(
            f"expected {what}, got {type(value).__name__}; make a batch with DataProto.from_dict or from_items"
        )


def check_fits(name: str, value: Any, dtype: Any, low: float, high: float, is_float: bool = False) -> None:
    """Raise ValueError unless a dtype with values from `low` to `high` can represent `value`; floats may round it."""
    if isinstance(value, int | float):
        if low <= value <= high and (is_float or value == int(value)):
            return
        if is_float and (value != value or abs(value) == math.inf):
            return
    raise ValueError(
        f"column {name!r} is {dtype}, which cannot hold {value!r}; pass another value or convert the column"
    )


def check_counts(counts: Mapping[str, int]) -> None:
    """Raise ValueError unless all columns have the same number of rows."""
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"expected the same number of rows in all columns, got {dict(counts)}; cut the longer ones, and put values "
            f"that are not per row into meta_info"
        )


def check_disjoint(tensors: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Raise ValueError for a name of both a tensor and a numpy column."""
    both = tensors.keys() & arrays.keys()
    if both:
        raise ValueError(
            f"expected one column per name, but {sorted(both)} are tensor and numpy columns; rename or pop one of each"
        )


def check_batch_dims(columns: Mapping[str, Any], others: Mapping[str, Any], num_batch_dims: int) -> None:
    """Raise ValueError unless all columns are dense and share their first `num_batch_dims` dims, if more than one."""
    if num_batch_dims < 1:
        raise ValueError(f"expected num_batch_dims >= 1, got {num_batch_dims}")
    if num_batch_dims == 1:
        return
    if others:
        raise ValueError(f"expected tensors only with num_batch_dims={num_batch_dims}, got non_tensors {list(others)}")
    sizes = {
        name: list(column.shape[:num_batch_dims]) if isinstance(column, Tensor) else "ragged"
        for name, column in columns.items()
    }
    first = next(iter(sizes.values()), [0] * num_batch_dims)
    if first == "ragged" or len(first) < num_batch_dims or any(size != first for size in sizes.values()):
        raise ValueError(
            f"expected dense tensors with the same first {num_batch_dims} dims, got {sizes}; lower num_batch_dims, or "
            f"reshape those that differ"
        )
