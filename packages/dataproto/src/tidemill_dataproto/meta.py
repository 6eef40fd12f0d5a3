"""Equality and merging of what batches carry besides tensors."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tidemill_dataproto import ragged

__all__ = ["merge_meta", "same"]


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, NaN equal to NaN, within dicts, lists, arrays and tensors too."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape or (a.dtype != b.dtype and not (a.dtype.kind == b.dtype.kind == "U")):
            return False
        if a.dtype == object:
            return all(same(x, y) for x, y in zip(a.ravel(), b.ravel(), strict=True))
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and a != a:
        return b != b
    return bool(a == b)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested or b.is_nested:
        both = ragged.is_ragged(a) and ragged.is_ragged(b)
        return both and same(ragged.offsets(a), ragged.offsets(b)) and same(a.values(), b.values())
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def merge_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the meta_info of several batches into a new, deep-copied one.

    A key keeps its value where all that have it agree. The values of "metrics", dicts or lists of dicts, are collected
    in one list, in order, whether they agree or not.

    Raises:
        ValueError: the values of another key differ; the error names the key and the parts.
    """
    merged: dict[str, Any] = {}
    source: dict[str, int] = {}
    for number, meta in enumerate(metas):
        for key, value in meta.items():
            if key == "metrics":
                merged.setdefault(key, []).extend(value if isinstance(value, list) else [value])
            elif key not in merged:
                merged[key], source[key] = value, number
            elif not same(merged[key], value):
                raise ValueError(
                    f"meta_info[{key!r}] is {merged[key]!r} in part {source[key]}, but {value!r} in part {number}; "
                    f'drop it with select(meta_info_keys=...), or keep what differs by part under meta_info["metrics"]'
                )
    return copy.deepcopy(merged)
