"""Tensors that are sent, and boxes: rectangular parts of an index space. Pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """The indices `start[d] <= i_d < start[d] + shape[d]`. A box without dims is the single element of a scalar."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise ValueError(f"start and shape must have the same length, got {self.start} and {self.shape}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """Return the box of all indices of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the indices in both boxes, or None if there are none.

        Raises:
            ValueError: the boxes have different numbers of dims.
        """
        if len(self.shape) != len(other.shape):
            raise ValueError(f"expected boxes with the same number of dims, got {self} and {other}")
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            low = max(a, b)
            size = min(a + n, b + m) - low
            if size <= 0:
                return None
            start.append(low)
            shape.append(size)
        return Box(tuple(start), tuple(shape))


def are_disjoint(boxes: Sequence[Box]) -> bool:
    """Return whether no index is in two boxes. Fast where the boxes divide a space along one dim, even for many boxes.

    Raises:
        ValueError: boxes that must be compared have different numbers of dims.
    """
    num_dims = min((len(box.shape) for box in boxes), default=0)
    # Sort along the dim with the most distinct starts; compare each box only with those that start before its end.
    dim = max(range(num_dims), key=lambda d: len({box.start[d] for box in boxes}), default=None)
    ordered = list(boxes) if dim is None else sorted(boxes, key=lambda box: box.start[dim])
    for number, box in enumerate(ordered):
        for other in range(number + 1, len(ordered)):
            if dim is not None and ordered[other].start[dim] >= box.start[dim] + box.shape[dim]:
                break
            if box.intersect(ordered[other]) is not None:
                return False
    return True


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A tensor that the trainer sends: its name, its full (global) shape and the dtype in which it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
