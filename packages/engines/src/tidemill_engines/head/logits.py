"""A slice of the logits, and the function from logits to the argument of softmax."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitRule:
    """The argument z of softmax from a logit x with bias b: softcap * tanh(scale * (x + b) / softcap) / temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def inner(self) -> float:
        """Inner factor: z = outer * f(inner * (x + b)), where f is tanh with a softcap and the identity without."""
        return 1.0 if self.softcap is None else self.scale / self.softcap

    @property
    def outer(self) -> float:
        return (self.scale if self.softcap is None else self.softcap) / self.temperature


class LogitSlice(NamedTuple):
    """Logits of M tokens for a contiguous slice of the vocabulary.

    Attributes:
        logits: [M, C] float32 or float64, contiguous; functions of this package overwrite them.
        bias: [C] or None.
        first: token id of the first column.
    """

    logits: torch.Tensor
    bias: torch.Tensor | None
    first: int
