"""Copy plans: what an engine does with each source tensor. Data only."""

from dataclasses import dataclass, field

import torch

from tidemill_weight_update.tensors.box import Box


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a box of source `name` into `parameter`, cast to the parameter's dtype `dtype`.

    Element `(i_0, i_1, ...)` of the source, with `i` in `box`, is copied to element `offset + sum((i_d - box.start[d])
    * strides[d])` of the parameter, relative to `data_ptr()`. The stride of a dim of size 1 is 0.
    """

    name: str
    box: Box
    parameter: str
    offset: int
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements of `parameter` that loading sets to a constant, such as padding. Written before any copy.

    The elements are `offset + sum(i_d * strides[d])` for all `i` below `shape`, relative to `data_ptr()`.
    """

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What `load_weights` does with its sources, as data.

    Attributes:
        copies: copies, each element of a parameter is written by at most one of them.
        fills: constants, written before the first copy.
        through_loader: name -> reason, for sources whose loading is more than copies. They have no copies; pass all of
            them, in this order, to one call of the model's own `load_weights` after the copies.
        converted: names in `through_loader` that loading would cast between integers and floating-point numbers.
        unused: names that loading does not copy anywhere: experts of other ranks, `lm_head` of a tied model.
        uncovered: parameter -> number of elements that nothing writes.
        overwritten: parameter -> number of elements that are written more than once, in `load_weights`.
    """

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...] = ()
    through_loader: dict[str, str] = field(default_factory=dict)
    converted: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    uncovered: dict[str, int] = field(default_factory=dict)
    overwritten: dict[str, int] = field(default_factory=dict)
