"""Merging of the facts about whole batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

from tidemill_dataproto.equality import same

__all__ = ["MergeRule", "merge_meta"]

MergeRule = Literal["same", "first", "list", "sum", "mean", "max", "min"] | Callable[[list[Any]], Any]
"""What becomes of the values that several batches have of one fact: see `DataProto.concat`."""

_DEFAULT_RULES: Mapping[str, MergeRule] = {"metrics": "list", "timing": "list"}


def merge_meta(
    metas: Sequence[Mapping[str, Any]], rules: Mapping[str, MergeRule] | None = None, weights: Sequence[int] = ()
) -> dict[str, Any]:
    """Merges the meta_info of several batches into a new one, which shares their values.

    Args:
        metas: of each batch.
        rules: how to merge which key; besides these, "metrics" and "timing" are lists and all else must be the same.
        weights: the number of rows of each batch, for "mean".

    Raises:
        ValueError: values that must be the same differ, or an unknown rule; the error names the key and the parts.
        TypeError: a rule for numbers on something else.
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
                    f"meta_info[{key!r}] is {values[0]!r} in part {parts[0][0]}, but {value!r} in part {number}; say "
                    f"how to merge it with merge={{{key!r}: ...}}, drop it with select(meta_info_keys=...), or keep "
                    f'what differs by part under meta_info["metrics"]'
                )
        return values[0]
    if rule not in ("sum", "mean", "max", "min"):
        known = "same, first, list, sum, mean, max, min"
        raise ValueError(f"meta_info[{key!r}]: unknown rule {rule!r}; known: {known}, or a function of the values")
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
            raise TypeError(f"meta_info[{key!r}]: expected numbers for the rule {rule!r}, got {type(value).__name__}")
    if rule == "mean":
        if sum(rows) == 0:
            return math.nan
        return math.fsum(value * count for value, count in zip(values, rows, strict=True) if count) / sum(rows)
    return {"sum": sum, "max": max, "min": min}[rule](values)
