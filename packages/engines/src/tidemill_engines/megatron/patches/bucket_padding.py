"""Optimizer state in checkpoints when gradients are in several buckets.

Upstream does:
    `DistributedOptimizer` gathers the state of a gradient buffer without the padding between its buckets
    (`distrib_optimizer.py:1109`), but slices parameters out of it by their offsets with padding (`:1500`).

Problem:
    Parameters after the first bucket whose length is not a multiple of the padding are saved with the state of other
    parameters, without an error.

Seen in:
    megatron-core 0.16.1

Remove when:
    Both places use the same offsets.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed import DistributedDataParallel


@contextmanager
def padded_buckets(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Context in which the buffers of `chunks` report their length with padding as their length without."""
    saved: list[tuple[Any, int]] = []
    for chunk in chunks:
        buffers: Any = chunk.buffers  # a list, unlike that of other modules
        for buffer in [*buffers, *chunk.expert_parallel_buffers]:
            saved += [(part, part.numel_unpadded) for part in (buffer, *buffer.buckets)]
    try:
        for part, _ in saved:
            part.numel_unpadded = part.grad_data.numel()
        yield
    finally:
        for part, numel in saved:
            part.numel_unpadded = numel
