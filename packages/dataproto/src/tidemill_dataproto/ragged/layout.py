"""Row lengths on the host: what ragged columns are worked with, so that nothing waits for a device.

torch keeps the offsets of a jagged nested tensor beside its values. Reading them from a CUDA device waits for all work
that is queued there, so a `Layout` keeps them on the host too, and its offsets on the device are made when torch asks.
"""

from collections.abc import MutableMapping

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["JaggedColumn", "Layout", "make_jagged", "on_device"]

# The numbers in offsets that lie on a device, read once or known from the start. They never change.
_KNOWN: MutableMapping[Tensor, np.ndarray] = WeakTensorKeyDictionary()


class Layout:
    """Where the rows of ragged columns begin and end in their values.

    Columns with the same Layout object have the same torch offsets object, which is what torch asks of two jagged
    tensors that meet in one operation. What is done with several columns keeps that: see `key`.
    """

    __slots__ = ("_bounds", "_offsets", "device")

    def __init__(self, bounds: np.ndarray, device: torch.device, offsets: Tensor | None = None) -> None:
        """`bounds`: int64 `[B + 1]`, never falling; a run out of a longer layout need not start at 0."""
        self._bounds = bounds
        self._offsets = offsets
        self.device = device

    @classmethod
    def of_lengths(cls, lengths: np.ndarray, device: torch.device) -> "Layout":
        bounds = np.zeros(lengths.shape[0] + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        return cls(bounds, device)

    @classmethod
    def of_offsets(cls, offsets: Tensor) -> "Layout":
        """The layout of torch's offsets, int64 `[B + 1]`; unknown ones on a device are read, which waits for it."""
        bounds = None if offsets.device.type == "cpu" else _KNOWN.get(offsets)
        if bounds is None:
            bounds = offsets.cpu().numpy().astype(np.int64, copy=False)
            if offsets.device.type != "cpu":
                _KNOWN[offsets] = bounds
        return cls(bounds, offsets.device, offsets)

    @property
    def num_rows(self) -> int:
        return self._bounds.shape[0] - 1

    @property
    def num_elements(self) -> int:
        return int(self._bounds[-1] - self._bounds[0])

    @property
    def bounds(self) -> np.ndarray:
        """int64 `[B + 1]` from 0 to the number of elements."""
        if self._bounds[0] != 0:
            self._bounds = self._bounds - self._bounds[0]
        return self._bounds

    @property
    def starts(self) -> np.ndarray:
        """int64 `[B]`: the first element of each row."""
        return self.bounds[:-1]

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[B]`."""
        return np.diff(self._bounds)

    @property
    def offsets(self) -> Tensor:
        """`bounds` as a tensor on the device; always the same object."""
        if self._offsets is None:
            self._offsets = on_device(torch.from_numpy(self.bounds), self.device)
            if self.device.type != "cpu":
                _KNOWN[self._offsets] = self.bounds
        return self._offsets

    def fits(self, num_elements: int) -> bool:
        """Whether the rows follow one another from the first to the last of so many elements."""
        bounds = self._bounds
        return bool(bounds[0] == 0 and bounds[-1] == num_elements and (bounds[1:] >= bounds[:-1]).all())

    @property
    def key(self) -> int:
        """The same for layouts that share their offsets, as they do if a column was made like that of another batch."""
        return id(self) if self._offsets is None else id(self._offsets)

    def cut(self, start: int, stop: int) -> "Layout":
        """The layout of a run of rows."""
        return Layout(self._bounds[start : stop + 1], self.device)

    def to(self, device: torch.device) -> "Layout":
        return self if device == self.device else Layout(self.bounds, device)

    def spread(self, per_row: np.ndarray) -> Tensor:
        """Repeats the number of each row, int64 `[B]`, for each of its elements: int64 `[N]` on the device."""
        if self.device.type == "cpu":  # torch's repeat_interleave takes ten times as long there
            return torch.from_numpy(np.repeat(per_row, self.lengths))
        counts = on_device(torch.from_numpy(self.lengths), self.device)
        numbers = on_device(torch.from_numpy(per_row), self.device)
        return numbers.repeat_interleave(counts, output_size=self.num_elements)

    def rows(self) -> Tensor:
        """The row of each element, int64 `[N]` on the device."""
        return self.spread(np.arange(self.num_rows))

    def shifted(self, by: np.ndarray) -> Tensor:
        """The number of each element plus the shift of its row, `by` `[B]`: int64 `[N]` on the device."""
        if self.device.type == "cpu":  # torch's arange takes three times as long there
            index = np.repeat(by, self.lengths)
            index += np.arange(index.shape[0])
            return torch.from_numpy(index)
        return self.spread(by).add_(torch.arange(self.num_elements, device=self.device))


class JaggedColumn:
    """A ragged column: values `[N, ...]`, the layout of its rows, and torch's nested tensor once somebody looks."""

    __slots__ = ("_tensor", "layout", "values")

    def __init__(self, values: Tensor, layout: Layout, tensor: Tensor | None = None) -> None:
        self.values = values
        self.layout = layout
        self._tensor = tensor

    @property
    def tensor(self) -> Tensor:
        """The jagged nested tensor `[B, j, ...]`; always the same object."""
        if self._tensor is None:
            self._tensor = make_jagged(self.values, self.layout.offsets)
        return self._tensor

    def made_tensor(self) -> Tensor | None:
        """`tensor` if somebody has asked for it."""
        return self._tensor


def make_jagged(values: Tensor, offsets: Tensor) -> Tensor:
    """torch's nested tensor of values and offsets that are known to fit each other."""
    if torch.is_inference_mode_enabled() and not values.is_inference():  # torch cannot make this view in inference mode
        with torch.inference_mode(False), torch.no_grad():
            return torch.nested.nested_tensor_from_jagged(values, offsets)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Copies a small CPU tensor without waiting for what is queued on the device."""
    # From pageable memory, the driver may wait; torch keeps pinned memory until the copy is done.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
