"""The description of a tensor that is sent."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A tensor that the trainer sends: its name, its full (global) shape and the dtype in which it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
