"""Concatenation of the columns of several batches, and merging of their meta_info."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeVar

import numpy as np

from tidemill_dataproto.columns import numpy_columns, tensor_columns
from tidemill_dataproto.columns.equality import same
from tidemill_dataproto.columns.tensor_columns import Column
from tidemill_dataproto.ragged.layout import JaggedColumn

__all__ = ["MergeRule", "join_columns", "merge_meta"]

MergeRule = Literal["same", "first", "list", "sum", "mean", "max", "min"] | Callable[[list[Any]], Any]
"""How to merge the values of one key of meta_info; see `DataProto.concat`."""

_DEFAULT_RULES: Mapping[str, MergeRule] = {"metrics": "list", "timing": "list"}
_T = TypeVar("_T")


def join_columns(
    tensors: Sequence[Mapping[str, Column]],
    arrays: Sequence[Mapping[str, np.ndarray]],
    num_rows: Sequence[int],
    fill: Mapping[str, Any],
) -> tuple[dict[str, Column], dict[str, np.ndarray]]:
    """Concatenate the rows of the parts, column by column; part i has num_rows[i] rows.

    Raises:
        ValueError: a column that some parts lack and `fill` does not name, a fill for a column that no part has or
            that the column cannot hold, or a column of different kinds; the error names it. A fill for a column that
            all parts have is ignored.
    """
    both: list[dict[str, Any]] = [{**a, **b} for a, b in zip(tensors, arrays, strict=True)]
    _check_names(both, fill)
    _check_halves(tensors, arrays)
    tensors = _filled(tensors, num_rows, fill, _fill_column)
    arrays = _filled(arrays, num_rows, fill, numpy_columns.fill)
    _check_kinds(tensors, tensor_columns.kind_of)
    _check_kinds(arrays, numpy_columns.kind_of)
    return tensor_columns.join(tensors), numpy_columns.join(arrays)


def _check_names(parts: Sequence[Mapping[str, Any]], fill: Mapping[str, Any]) -> None:
    everywhere = {name: [number for number, part in enumerate(parts) if name not in part] for name in _names(parts)}
    unknown = [name for name in fill if name not in everywhere]
    if unknown:
        raise ValueError(f"expected fill for columns of at least one part, got {unknown}; known: {list(everywhere)}")
    lacking = {name: numbers for name, numbers in everywhere.items() if numbers and name not in fill}
    if lacking:
        text = "; ".join(f"{name!r} is missing from part {_brief(numbers)}" for name, numbers in lacking.items())
        raise ValueError(
            f"expected the same columns in all {len(parts)} parts, but {text}; pass "
            f"fill={{name: value}}, or select() the columns that all parts have"
        )


def _check_halves(tensors: Sequence[Mapping[str, Column]], arrays: Sequence[Mapping[str, np.ndarray]]) -> None:
    in_tensors = {name: number for number, part in enumerate(tensors) for name in part}
    in_arrays = {name: number for number, part in enumerate(arrays) for name in part}
    for name, number in in_tensors.items():
        if name in in_arrays:
            (first, kind), (second, other) = sorted([(number, "a tensor"), (in_arrays[name], "a numpy array")])
            raise ValueError(
                f"column {name!r} is {other} in part {second}, but {kind} in part {first}; convert one first"
            )


def _names(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _filled(
    parts: Sequence[Mapping[str, _T]],
    num_rows: Sequence[int],
    fill: Mapping[str, Any],
    make: Callable[[str, _T, int, Any], _T],
) -> list[dict[str, _T]]:
    """Add the missing columns to all parts, in the order of the first part that has them."""
    examples = {name: part[name] for part in reversed(parts) for name in part}
    return [
        {name: part[name] if name in part else make(name, examples[name], count, fill[name]) for name in _names(parts)}
        for part, count in zip(parts, num_rows, strict=True)
    ]


def _fill_column(name: str, like: Column, num_rows: int, value: Any) -> Column:
    if isinstance(like, JaggedColumn) and value is not None:
        raise ValueError(
            f"column {name!r} is ragged and can only be filled with empty rows; pass fill={{{name!r}: None}}"
        )
    return tensor_columns.fill(name, like, num_rows, value)


def _check_kinds(parts: Sequence[Mapping[str, _T]], kind_of: Callable[[_T], str]) -> None:
    for name, first in parts[0].items():
        kind = kind_of(first)
        for number, part in enumerate(parts):
            other = kind_of(part[name])
            if other != kind:
                raise ValueError(
                    f"column {name!r} is {other} in part {number}, but {kind} in part 0; convert one first"
                )


def _brief(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:8]))
    return listed if len(numbers) <= 8 else f"{listed} and {len(numbers) - 8} more"


def merge_meta(
    metas: Sequence[Mapping[str, Any]], rules: Mapping[str, MergeRule] | None = None, weights: Sequence[int] = ()
) -> dict[str, Any]:
    """Merge the meta_info of several batches into a new dict, which shares their values.

    Args:
        metas: meta_info of each batch.
        rules: rule by key; without a rule, "metrics" and "timing" become lists and all other values must be equal.
        weights: number of rows of each batch, for "mean".

    Raises:
        ValueError: values that must be equal differ, or an unknown rule; the error names the key and the parts.
        TypeError: a rule for numbers on another value.
    """
    found: dict[str, list[tuple[int, Any]]] = {}
    for number, meta in enumerate(metas):
        for key, value in meta.items():
            found.setdefault(key, []).append((number, value))
    all_rules: dict[str, MergeRule] = {**_DEFAULT_RULES, **({} if rules is None else rules)}
    return {key: _merge(key, parts, all_rules.get(key, "same"), weights) for key, parts in found.items()}


def _merge(key: str, parts: list[tuple[int, Any]], rule: MergeRule, weights: Sequence[int]) -> Any:
    values = [value for _, value in parts]
    if callable(rule):
        return rule(values)
    if rule == "list":
        return [item for value in values for item in (value if isinstance(value, list) else [value])]
    if rule == "first":
        return values[0]
    if rule == "same":
        for number, value in parts:
            if not same(values[0], value):
                raise ValueError(
                    f"meta_info[{key!r}] is {values[0]!r} in part {parts[0][0]}, but {value!r} in part {number}; pass "
                    f"merge={{{key!r}: rule}}, drop the key with select(meta_info_keys=...), or store values "
                    f'that differ by part under meta_info["metrics"]'
                )
        return values[0]
    if rule not in ("sum", "mean", "max", "min"):
        known = "same, first, list, sum, mean, max, min"
        raise ValueError(
            f"meta_info[{key!r}]: unknown rule {rule!r}; known: {known}, or a function of the list of values"
        )
    rows = [weights[number] if weights else 1 for number, _ in parts]
    if not all(isinstance(value, Mapping) for value in values):
        return _reduce(key, values, rule, rows)
    by_name: dict[str, list[tuple[Any, int]]] = {}
    for value, count in zip(values, rows, strict=True):
        for name, number in value.items():
            by_name.setdefault(name, []).append((number, count))
    return {
        name: _reduce(f"{key}.{name}", [number for number, _ in pairs], rule, [count for _, count in pairs])
        for name, pairs in by_name.items()
    }


def _reduce(key: str, values: list[Any], rule: str, rows: list[int]) -> Any:
    for value in values:
        if not isinstance(value, Real):
            raise TypeError(
                f"meta_info[{key!r}]: expected numbers for the rule {rule!r}, got {type(value).__name__}; use the "
                f"rule 'list'"
            )
    if rule == "mean":
        if sum(rows) == 0:
            return math.nan
        return math.fsum(value * count for value, count in zip(values, rows, strict=True) if count) / sum(rows)
    if any(map(math.isnan, values)):
        return math.nan  # max() and min() would depend on the order
    return {"sum": sum, "max": max, "min": min}[rule](values)
