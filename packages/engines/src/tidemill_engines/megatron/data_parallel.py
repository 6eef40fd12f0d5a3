"""Megatron's wrapper for data parallelism: buffers of weights and gradients, and when they are exchanged."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from tidemill_engines.megatron.config import MegatronConfig
from tidemill_engines.megatron.experts import GroupedExperts
from tidemill_engines.megatron.model import HiddenStatesModel
from tidemill_engines.megatron.weight_gradients import add_in_products


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


def grad_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    """The tensors in which all gradients lie."""
    for chunk in chunks:
        buffers: Any = chunk.buffers  # a list, unlike that of other modules
        for each in [*buffers, *chunk.expert_parallel_buffers]:
            yield each.grad_data
