"""State of Megatron's data-parallel wrapper that it does not update itself.

Upstream does:
    1. Reduce the gradients of experts over the data-parallel ranks of all other parameters, unless
       `expert_model_parallel_size` is above 1 (`layers.py:886`).
    2. Mark weights for the next all-gather at the end of a backward only (`param_and_grad_buffer.py:516`).
    3. Keep the count of ready gradients, and the handle of a started reduction, after a backward that failed.

Problem:
    1. Tensor-parallel ranks that hold whole experts (`expert_tensor_parallel_size=1`) have different tokens, and their
       gradients are left out of the sum.
    2. With `overlap_param_gather`, weights that were gathered between backward and optimizer step (for an evaluation or
       an export) are not gathered again, and the next forward uses old ones.
    3. The next backward starts reductions at the wrong time, or raises.

Seen in:
    megatron-core 0.16.1

Remove when:
    1. `allreduce` of an expert's parameters follows the groups that hold them.
    2. The optimizer step marks weights for the next all-gather.
    3. `zero_grad_buffer` resets counts and waits for started reductions.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import TransformerConfig
from torch import nn


def reduce_experts_over_their_replicas(model: nn.Module, config: TransformerConfig) -> None:
    """Sum the gradients of experts over the ranks that hold the same experts. Call it before `model` is wrapped."""
    if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
        for name, weight in model.named_parameters():
            if ".experts." in name:
                weight.allreduce = False  # type: ignore[attr-defined]


def require_param_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Make the next forward of training gather the weights, whether or not they were gathered before."""
    for group in _bucket_groups(chunks):
        group.param_gather_dispatched = False


def drop_unfinished_reductions(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wait for the reductions that a failed backward started, and forget which gradients were ready in it."""
    for group in _bucket_groups(chunks):
        handle, group.grad_reduce_handle = group.grad_reduce_handle, None
        group.per_param_grad_ready_counts = {}
        if handle is not None:
            handle.wait()


def _bucket_groups(chunks: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    for chunk in chunks:
        groups: Any = chunk.bucket_groups  # a list, unlike that of other modules
        yield from [*groups, *chunk.expert_parallel_bucket_groups]
