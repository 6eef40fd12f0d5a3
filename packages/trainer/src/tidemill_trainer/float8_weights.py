"""The weights of a policy in block-wise float8, as its engines receive them."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tidemill_weight_update.fp8 import BlockFp8


def float8_weights(weights: Iterable[tuple[str, Any]], group_bytes: int) -> Iterator[tuple[str, Any]]:
    """Yield weights with their projections in float8, each followed by the scales of its blocks.

    Collective on the ranks of DTensors. Nothing remains in memory: weights that are copies are taken, quantized by a
    kernel and released in groups.

    Args:
        weights: what `WeightUpdater.update` accepts.
        group_bytes: size of a group, as whole weights in float32, so that all ranks form equal groups.
    """
    group: list[tuple[str, Any]] = []
    num_bytes = 0
    for name, weight in weights:
        shape = weight.shape if isinstance(weight, torch.Tensor) else weight.global_shape
        num_bytes += 4 * math.prod(shape)
        group.append((name, weight))
        if num_bytes >= group_bytes:
            yield from BlockFp8(group).quantize()
            group, num_bytes = [], 0
    yield from BlockFp8(group).quantize()
