"""Equality of arbitrary values, including tensors and arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tidemill_dataproto.ragged.columns import is_ragged, open_column
from tidemill_dataproto.ragged.layout import JaggedColumn

__all__ = ["same"]


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, NaN equal to NaN, also inside dicts, lists, arrays and tensors.

    Tensors on different devices are not equal. Comparing tensors on CUDA waits for the device.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, JaggedColumn) and isinstance(b, JaggedColumn):
        return same(a.layout.bounds, b.layout.bounds) and same(a.values, b.values)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape or (a.dtype != b.dtype and not (a.dtype.kind == b.dtype.kind == "U")):
            return False
        if a.dtype == object:
            return all(same(x, y) for x, y in zip(a.ravel(), b.ravel(), strict=True))
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.generic):
        return same(np.asarray(a), np.asarray(b))
    if isinstance(a, float) and a != a:
        return b != b
    return bool(a == b)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested or b.is_nested:
        return is_ragged(a) and is_ragged(b) and same(open_column(a), open_column(b))
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    if a.is_floating_point() and a.itemsize == 1:  # torch cannot compare all of these
        a, b = a.float(), b.float()
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
