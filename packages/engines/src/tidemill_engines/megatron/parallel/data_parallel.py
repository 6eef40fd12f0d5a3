"""Megatron's data-parallel wrapper: buffers of weights and gradients, and when they are communicated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from torch import nn

from tidemill_engines.megatron.config import MegatronConfig
from tidemill_engines.megatron.patches.data_parallel import (
    drop_unfinished_reductions,
    reduce_experts_over_their_replicas,
)
from tidemill_engines.megatron.patches.experts import GroupedExperts
from tidemill_engines.megatron.patches.weight_gradients import accumulate_in_products
from tidemill_engines.optimizer import INCOMPLETE_GRADIENTS


def wrap_chunks(
    models: Sequence[nn.Module], transformer: TransformerConfig, config: MegatronConfig, *, is_trained: bool
) -> list[DistributedDataParallel]:
    """Wrap the model chunks of this rank.

    Args:
        transformer: configuration of the model; gets `no_sync_func` if gradients are reduced during the backward.
        is_trained: without training there are no gradients, and weights are not moved into buffers.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=is_trained and config.use_distributed_optimizer,
        overlap_grad_reduce=is_trained and config.overlap_grad_reduce,
        overlap_param_gather=is_trained and config.overlap_param_gather,
    )
    for model in models:
        reduce_experts_over_their_replicas(model, transformer)
        if is_trained and transformer.params_dtype == torch.bfloat16 and next(model.parameters()).is_cuda:
            accumulate_in_products(model)
    chunks = [
        DistributedDataParallel(transformer, settings, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    for chunk in chunks:
        for experts in (module for module in chunk.modules() if isinstance(module, GroupedExperts)):
            experts.register_forward_pre_hook(partial(_wait_for_module, chunk))
            experts.accumulates_gradients = is_trained
            if settings.overlap_grad_reduce:
                experts.on_gradient_ready = partial(_register_gradient, chunk)
    if settings.overlap_grad_reduce:
        no_sync: Any = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return chunks


def wait_for_weight(chunk: DistributedDataParallel, weight: torch.nn.Parameter) -> None:
    """Wait for the all-gather of a weight that is used outside its module, whose forward would wait for it."""
    if chunk.use_forward_hook:
        chunk.param_to_bucket_group[weight].finish_param_sync()


def _wait_for_module(chunk: DistributedDataParallel, module: torch.nn.Module, *_: Any) -> None:
    for weight in module.parameters() if chunk.use_forward_hook else ():
        wait_for_weight(chunk, weight)


def _register_gradient(chunk: DistributedDataParallel, weight: torch.nn.Parameter) -> None:
    """Mark a gradient as ready for reduction, as Megatron's hooks do for gradients that autograd computes."""
    chunk.param_to_bucket_group[weight].register_grad_ready(weight, chunk.force_all_reduce)


def grad_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    """The tensors that hold all gradients."""
    for chunk in chunks:
        buffers: Any = chunk.buffers  # a list, unlike that of other modules
        for each in [*buffers, *chunk.expert_parallel_buffers]:
            yield each.grad_data


class Gradients:
    """Gradients of a step: accumulated on each rank by backwards, and reduced over the ranks once.

    Args:
        chunks: model chunks of this rank.
        overlap: reduce during the backward; a step then has only one backward.

    Attributes:
        are_zero: whether there was no backward since `zero`.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], *, overlap: bool) -> None:
        self._chunks = list(chunks)
        self._overlap = overlap
        self.are_zero = True
        self._are_reduced = self._has_failed = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward, which adds to the gradients.

        Raises:
            RuntimeError: the gradients were reduced, or a backward failed, since `zero`.
        """
        if self._are_reduced or self._has_failed:
            raise RuntimeError(
                "expected gradients that were not reduced yet, but they have been reduced over the ranks (by a norm or "
                "a step, or with MegatronConfig.overlap_grad_reduce by the backward itself), or a backward has failed; "
                "call optimizer_zero_grad() before another one"
            )
        self.are_zero = False
        try:
            yield
            if self._overlap:
                self.reduce()
        except BaseException:
            self._has_failed = True
            drop_unfinished_reductions(self._chunks)
            raise

    def reduce(self) -> None:
        """Sum the gradients over the ranks that share them, unless that was done. Collective.

        The pipeline schedules do not do it, because they would reduce the gradients of earlier batches of the step
        again. Nothing is divided by a number of tokens, because losses are normalized already.

        Raises:
            RuntimeError: a backward has failed since `zero`.
        """
        if self._has_failed:
            raise RuntimeError(INCOMPLETE_GRADIENTS)
        if not self.are_zero and not self._are_reduced:
            finalize_model_grads(list(self._chunks))  # type: ignore[arg-type]
            self._are_reduced = True

    def zero(self) -> None:
        """Set the gradients to zero."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.are_zero = True
        self._are_reduced = self._has_failed = False
