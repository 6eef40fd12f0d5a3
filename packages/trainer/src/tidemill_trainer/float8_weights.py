"""The weights of a policy in block-wise float8, as its engines receive them."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tidemill_weight_update.fp8 import BlockFp8
from torch.distributed.tensor import DTensor


def float8_weights(weights: Iterable[tuple[str, Any]], group_bytes: int) -> Iterator[tuple[str, Any]]:
    """Yield weights with their projections in float8, each followed by the scales of its blocks.

    Nothing remains in memory: weights that are copies are taken, quantized by a kernel and released in groups.
    Collective on the ranks of DTensors, which all of them yield in the same order; if one rank stops early, others may
    wait for it until the timeout of its process group.

    Args:
        weights: what `WeightUpdater.update` accepts.
        group_bytes: size of a group, as whole weights in float32.
    """
    # Ranks may have other parts that are no DTensors, such as experts; groups of DTensors are the same on all ranks.
    groups: dict[bool, list[tuple[str, Any]]] = {True: [], False: []}
    num_bytes = {True: 0, False: 0}
    for name, weight in weights:
        is_shared = isinstance(weight, DTensor)
        shape = weight.shape if isinstance(weight, torch.Tensor) else weight.global_shape
        groups[is_shared].append((name, weight))
        num_bytes[is_shared] += 4 * math.prod(shape)
        if num_bytes[is_shared] >= group_bytes:
            yield from BlockFp8(groups[is_shared]).quantize()
            groups[is_shared], num_bytes[is_shared] = [], 0
    for group in groups.values():
        yield from BlockFp8(group).quantize()
