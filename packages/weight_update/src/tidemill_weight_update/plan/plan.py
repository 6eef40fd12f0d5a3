"""Copy plans: what an engine does with each source tensor. Data only."""

from dataclasses import dataclass, field

import torch

from tidemill_weight_update.tensors.box import Box


@dataclass(frozen=True, slots=True)
class Copy:
    """A box of source `name` that is copied into `parameter`, cast to `dtype`, the parameter's.

    Element `(i_0, i_1, ...)` of the source, with `i` in `box`, goes to element
    `offset + sum((i_d - box.start[d]) * strides[d])` of the parameter, counted from the one at `data_ptr()`.
    The stride of a dim of size 1 is 0.
    """

    name: str
    box: Box
    parameter: str
    offset: int
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements of `parameter` that loading sets to a constant, such as padding: to be written before any copy.

    Counted as in `Copy`: element `offset + sum(i_d * strides[d])` for all `i` below `shape`.
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
        copies: no element of a parameter is written by two of them.
        fills: constants, to be written before the first copies.
        through_loader: names whose loading is no pure copy -> why. They have no copies; give all of them, in this
            order, to one call of the model's own `load_weights` after the copies.
        converted: names in `through_loader` that loading would cast between integers and floating-point numbers.
        unused: names that loading does not copy anywhere: another rank's experts, `lm_head` of a tied model.
        uncovered: parameter -> number of its elements that nothing writes.
        overwritten: parameter -> number of its elements that more than one source writes. The last one counts.
    """

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...] = ()
    through_loader: dict[str, str] = field(default_factory=dict)
    converted: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    uncovered: dict[str, int] = field(default_factory=dict)
    overwritten: dict[str, int] = field(default_factory=dict)
