"""A part of a weight, for parallelism that DTensors do not describe."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightShard:
    """A part of a tensor of the checkpoint that one rank holds.

    Attributes:
        tensor: values: a view of the parameter, or a copy if they had to be cast.
        global_shape: shape of the whole tensor.
        start: index of the first element of the part in the whole tensor, for each dim.
        replica: index of this copy among the identical copies on several ranks.
        num_replicas: number of identical copies.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    replica: int
    num_replicas: int
