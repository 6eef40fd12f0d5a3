"""Row lengths on the host, for ragged columns, so that no operation waits for a device.

torch stores the offsets of a jagged nested tensor on the device of its values. Reading them from a CUDA device waits
for all work in its queue. A `Layout` keeps them on the host too and creates the offsets on the device when torch needs
them.
"""

from collections.abc import MutableMapping

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["JaggedColumn", "Layout", "make_jagged", "on_device"]

# Values of offsets on a device, read once or known from the start. They never change.
_KNOWN: MutableMapping[Tensor, np.ndarray] = WeakTensorKeyDictionary()


class Layout:
    """Start and end of each row of ragged columns in their values.

    Columns with the same Layout object have the same torch offsets object, which torch requires of two jagged tensors
    in one operation. Operations on several columns preserve this; see `key`.
    """

    __slots__ = ("_bounds", "_offsets", "device")

    def __init__(self, bounds: np.ndarray, device: torch.device, offsets: Tensor | None = None) -> None:
        """Store `bounds`, int64 `[B + 1]`, non-decreasing. Bounds cut from a longer layout may start above 0."""
        self._bounds = bounds
        self._offsets = offsets
        self.device = device

    @classmethod
    def of_lengths(cls, lengths: np.ndarray, device: torch.device) -> "Layout":
        """Make the layout of rows of these lengths, int64 `[B]`."""
        bounds = np.zeros(lengths.shape[0] + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        return cls(bounds, device)

    @classmethod
    def of_offsets(cls, offsets: Tensor) -> "Layout":
        """Make the layout of torch's offsets, int64 `[B + 1]`. Reads offsets on a device once, which waits for it."""
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
        """int64 `[B + 1]`, from 0 to the number of elements."""
        if self._bounds[0] != 0:
            self._bounds = self._bounds - self._bounds[0]
        return self._bounds

    @property
    def starts(self) -> np.ndarray:
        """int64 `[B]`: the first element of each row."""
        return self.bounds[:-1]

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[B]`: the number of elements of each row."""
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
        """Return whether the rows cover exactly `num_elements` elements, in order and without gaps."""
        bounds = self._bounds
        return bool(bounds[0] == 0 and bounds[-1] == num_elements and (bounds[1:] >= bounds[:-1]).all())

    @property
    def key(self) -> int:
        """Identity of the offsets: equal for layouts that share them, in one batch or several."""
        return id(self) if self._offsets is None else id(self._offsets)

    def cut(self, start: int, stop: int) -> "Layout":
        """Return the layout of rows start to stop."""
        return Layout(self._bounds[start : stop + 1], self.device)

    def to(self, device: torch.device) -> "Layout":
        """Return the layout on another device."""
        return self if device == self.device else Layout(self.bounds, device)

    def spread(self, per_row: np.ndarray) -> Tensor:
        """Repeat the number of each row, int64 `[B]`, for each of its elements: int64 `[N]` on the device."""
        if self.device.type == "cpu":  # ten times as fast as torch's repeat_interleave there
            return torch.from_numpy(np.repeat(per_row, self.lengths))
        counts = on_device(torch.from_numpy(self.lengths), self.device)
        numbers = on_device(torch.from_numpy(per_row), self.device)
        return numbers.repeat_interleave(counts, output_size=self.num_elements)

    def rows(self) -> Tensor:
        """Return the row of each element, int64 `[N]` on the device."""
        return self.spread(np.arange(self.num_rows))

    def shifted(self, by: np.ndarray) -> Tensor:
        """Return the index of each element plus the shift of its row, `by` `[B]`: int64 `[N]` on the device."""
        if self.device.type == "cpu":  # three times as fast as torch's arange there
            index = np.repeat(by, self.lengths)
            index += np.arange(index.shape[0])
            return torch.from_numpy(index)
        return self.spread(by).add_(torch.arange(self.num_elements, device=self.device))


class JaggedColumn:
    """A ragged column: values `[N, ...]`, the layout of its rows, and, once requested, torch's nested tensor."""

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
        """Return `tensor` if it has been requested before, else None."""
        return self._tensor


def make_jagged(values: Tensor, offsets: Tensor) -> Tensor:
    """Make a jagged nested tensor of values and offsets that are known to match."""
    # torch cannot create this view in inference mode
    if torch.is_inference_mode_enabled() and not values.is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return torch.nested.nested_tensor_from_jagged(values, offsets)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting for the work in its queue."""
    # A copy from pageable memory may wait; torch keeps the pinned memory until the copy is done.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
