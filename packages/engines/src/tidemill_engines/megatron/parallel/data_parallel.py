"""Megatron's wrapper for data parallelism: buffers of weights and gradients, and when they are exchanged."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig

from tidemill_engines.megatron.config import MegatronConfig
from tidemill_engines.megatron.model.build import HiddenStatesModel
from tidemill_engines.megatron.patches.experts import GroupedExperts
from tidemill_engines.megatron.patches.weight_gradients import add_in_products


def wrap_chunks(
    models: Sequence[HiddenStatesModel], transformer: TransformerConfig, config: MegatronConfig, *, is_trained: bool
) -> list[DistributedDataParallel]:
    """Wraps the model's chunks on this rank; `transformer` learns how to leave out exchanges between micro-batches.

    Args:
        is_trained: without training there are no gradients, and weights stay where they are.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=is_trained and config.use_distributed_optimizer,
        overlap_grad_reduce=is_trained and config.overlap_grad_reduce,
        overlap_param_gather=is_trained and config.overlap_param_gather,
    )
    for model in models:
        _tell_experts_apart(model, transformer)
        if is_trained and transformer.params_dtype == torch.bfloat16 and next(model.parameters()).is_cuda:
            add_in_products(model)
    chunks = [
        DistributedDataParallel(transformer, settings, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    for chunk in chunks:
        for experts in (module for module in chunk.modules() if isinstance(module, GroupedExperts)):
            experts.register_forward_pre_hook(partial(_wait_for_all, chunk))
            experts.adds_gradients = is_trained
            if settings.overlap_grad_reduce:
                experts.tell_ready = partial(_tell_ready, chunk)
    if settings.overlap_grad_reduce:
        no_sync: Any = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return chunks


def _tell_experts_apart(model: HiddenStatesModel, transformer: TransformerConfig) -> None:
    """Lets experts' gradients be added over the ranks that have the same experts.

    Megatron takes those of all other parameters for it unless experts are divided (`layers.py:886`), which leaves out
    tensor-parallel ranks that have whole experts and other tokens.
    """
    if transformer.expert_tensor_parallel_size != transformer.tensor_model_parallel_size:
        for name, weight in model.named_parameters():
            if ".experts." in name:
                weight.allreduce = False  # type: ignore[attr-defined]


def wait_for(chunk: DistributedDataParallel, weight: torch.nn.Parameter) -> None:
    """Lets a weight that is used outside of its module be gathered, which the modules' own use does by itself."""
    if chunk.use_forward_hook:
        chunk.param_to_bucket_group[weight].finish_param_sync()


def _wait_for_all(chunk: DistributedDataParallel, module: torch.nn.Module, *_: Any) -> None:
    for weight in module.parameters() if chunk.use_forward_hook else ():
        wait_for(chunk, weight)


def _tell_ready(chunk: DistributedDataParallel, weight: torch.nn.Parameter) -> None:
    """Lets a gradient be reduced with the others of its bucket, which Megatron's hooks do for those of autograd."""
    chunk.param_to_bucket_group[weight].register_grad_ready(weight, chunk.force_all_reduce)


def gather_afresh(chunks: Sequence[DistributedDataParallel]) -> None:
    """Lets the next forward of training gather the weights, whatever was gathered before.

    Megatron forgets that at the end of a backward only (`param_and_grad_buffer.py:516`), so that the forward behind an
    update would leave out weights that were read between backward and update.
    """
    for group in _bucket_groups(chunks):
        group.param_gather_dispatched = False


def _bucket_groups(chunks: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    for chunk in chunks:
        groups: Any = chunk.bucket_groups  # a list, unlike that of other modules
        yield from [*groups, *chunk.expert_parallel_bucket_groups]


def grad_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    """The tensors in which all gradients lie."""
    for chunk in chunks:
        buffers: Any = chunk.buffers  # a list, unlike that of other modules
        for each in [*buffers, *chunk.expert_parallel_buffers]:
            yield each.grad_data


class Gradients:
    """What the backwards of a step have added up on each rank, and over the ranks once it is asked for.

    Args:
        chunks: of this rank.
        overlap: whether a backward reduces over the ranks while it goes on: then a step has one.

    Attributes:
        are_zero: whether there was no backward since `zero`.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], *, overlap: bool) -> None:
        self._chunks = list(chunks)
        self._overlap = overlap
        self.are_zero = True
        self._are_reduced = self._is_broken = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward, which adds to the gradients.

        Raises:
            RuntimeError: they are reduced already, and would be once more; or a backward has failed since `zero`.
        """
        if self._are_reduced or self._is_broken:
            raise RuntimeError(
                "the gradients have been reduced over the ranks (by a norm or a step, or with "
                "MegatronConfig.overlap_grad_reduce by the backward itself), or a backward has failed; call "
                "optimizer_zero_grad() before another one"
            )
        self.are_zero, self._is_broken = False, True
        try:
            yield
            if self._overlap:
                self.reduce()
        except BaseException:
            self._settle()
            raise
        self._is_broken = False

    def _settle(self) -> None:
        """Waits for what a backward that failed has begun, and lets Megatron forget what was ready in it."""
        for group in _bucket_groups(self._chunks):
            handle, group.grad_reduce_handle = group.grad_reduce_handle, None
            group.per_param_grad_ready_counts = {}
            if handle is not None:
                handle.wait()

    def reduce(self) -> None:
        """Adds them up over the ranks that have a share of them, unless that is done. Collective.

        Not by the schedules, which would reduce again what an earlier batch of the step brought; nor divided by a
        number of tokens, as losses are normalized already.
        """
        if not self.are_zero and not self._are_reduced:
            finalize_model_grads(list(self._chunks))  # type: ignore[arg-type]
            self._are_reduced = True

    def zero(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.are_zero = True
        self._are_reduced = self._is_broken = False
