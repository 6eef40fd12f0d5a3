"""A slice of the logits, and the rule from logits to the argument of softmax."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitRule:
    """How a logit x with its bias b becomes z, which softmax is over: softcap * tanh(scale * (x + b) / softcap) / T."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def inner(self) -> float:
        """z = outer * f(inner * (x + b)), where f is tanh with a softcap, and nothing without."""
        return 1.0 if self.softcap is None else self.scale / self.softcap

    @property
    def outer(self) -> float:
        return (self.scale if self.softcap is None else self.softcap) / self.temperature


class LogitSlice(NamedTuple):
    """The logits of M tokens for a run of the vocabulary.

    Attributes:
        logits: [M, C] float32 or float64, contiguous; overwritten by whoever is given them.
        bias: [C] or None.
        first: which token of the vocabulary the first column is.
    """

    logits: torch.Tensor
    bias: torch.Tensor | None
    first: int
