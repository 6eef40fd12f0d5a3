"""What a column must be, and the errors that say so."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill_dataproto import ragged
from tidemill_dataproto.columns import object_column

__all__ = ["as_array", "check_array", "check_counts", "check_known", "check_tensor", "pick"]


def check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises KeyError for a name that is not among the known ones."""
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KeyError(f"no {what} {', '.join(map(repr, unknown))}; there are {known}")


def pick(source: Mapping[str, Any], keys: Sequence[str] | None, what: str) -> dict[str, Any]:
    """The items of `keys`, all where None. Raises KeyError for an unknown name, TypeError for a string."""
    if isinstance(keys, str):
        raise TypeError(f"expected a list of names, got the string {keys!r}; write [{keys!r}]")
    names = list(source) if keys is None else list(keys)
    check_known(what, names, source)
    return {name: source[name] for name in names}


def check_counts(counts: Mapping[str, int]) -> None:
    """Raises ValueError unless all columns have the same number of rows."""
    if len(set(counts.values())) > 1:
        raise ValueError(f"expected the same number of rows in all columns, got {dict(counts)}")


def check_tensor(name: str, column: Any) -> None:
    """Raises TypeError or ValueError unless `column` is a dense tensor `[B, ...]` or a jagged one `[B, j, ...]`."""
    if not isinstance(name, str):
        raise TypeError(f"expected a column name as a string, got {name!r}")
    if not isinstance(column, Tensor):
        raise TypeError(f"column {name!r}: expected a tensor, got {type(column).__name__}; see DataProto.from_dict")
    if ragged.is_ragged(column):
        offsets = ragged.offsets(column)
        if offsets[0] != 0 or offsets[-1] != column.values().shape[0]:
            raise ValueError(f"column {name!r}: expected offsets from 0 to the number of values; see ragged.ragged()")
    elif column.layout != torch.strided or column.is_nested or column.dim() == 0:
        kind = "nested tensor" if column.is_nested else f"tensor of {column.dim()} dims"
        raise ValueError(
            f"column {name!r}: expected a dense tensor [B, ...] or a jagged one [B, j, ...], got a {kind} of layout "
            f"{column.layout}; see ragged.ragged_from_list()"
        )


def check_array(name: str, array: Any) -> None:
    """Raises TypeError or ValueError unless `array` is a numpy array `[B, ...]`, or `[B]` if it holds objects."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"column {name!r}: expected a numpy array in non_tensor_batch, got {type(array).__name__}; "
            f"DataProto.from_dict makes one of a list"
        )
    if array.ndim == 0 or (array.dtype == object and array.ndim != 1):
        raise ValueError(
            f"column {name!r}: expected one object per row, got {array.dtype} {list(array.shape)}; "
            f"pass a list to DataProto.from_dict"
        )


def as_array(name: str, column: Any) -> np.ndarray:
    """A numpy column of an array, list or tuple. Lists and 2-D object arrays give one object per row."""
    if isinstance(column, list | tuple):
        return object_column(column)
    if not isinstance(column, np.ndarray) or column.ndim == 0:
        raise TypeError(f"column {name!r}: expected a numpy array or list of rows, got {type(column).__name__}")
    # numpy makes a 2-D object array of lists that happen to be equally long; back to one list per row.
    return object_column(column.tolist()) if column.dtype == object and column.ndim > 1 else column
