"""A part of a weight, for engines whose parallelism DTensors do not describe."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightShard:
    """What one rank holds of a tensor of the checkpoint, or one part of that.

    Attributes:
        tensor: the values: a view of the parameter, so they change with it, unless they had to be cast.
        global_shape: of the whole tensor.
        start: where the part begins in it, an index for each dim; its shape is that of `tensor`.
        replica, num_replicas: which of the equal copies on several ranks this is.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    replica: int
    num_replicas: int
