"""Angles of rotary position embeddings, for rows whose positions start at 0 each."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXED_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope types of transformers whose angles do not depend on the length of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Angles by which queries and keys are rotated.

    Attributes:
        frequencies: [D / 2], float32, the difference of the angles of two neighbouring positions, for each pair of
            dimensions of a head.
        scaling: factor of cosines and sines (YaRN's attention factor).
    """

    frequencies: tuple[float, ...]
    scaling: float = 1.0

    @classmethod
    def from_config(cls, config: PretrainedConfig, head_dim: int) -> "Rotary":
        """Frequencies as transformers computes them for one of the `FIXED_TYPES`."""
        rope = config.rope_parameters
        scaling = 1.0
        if rope["rope_type"] == "default":
            frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
        return cls(frequencies=tuple(frequencies.tolist()), scaling=scaling)

    def cos_sin(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [n, 1, D / 2] of the angles at positions [1, n], computed in float32."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32).to(position_ids.device, non_blocking=True)
        angles = position_ids.view(-1, 1, 1).float() * frequencies
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)
