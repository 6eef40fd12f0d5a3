"""A batch through Megatron's pipeline schedules."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tidemill_dataproto import DataProto
from torch import nn

from tidemill_engines.megatron.batch.packed import MegatronInputs

Finish = Callable[[DataProto, MegatronInputs, torch.Tensor], tuple[torch.Tensor, Any]]
"""`(micro_batch, inputs, hidden_states) -> (loss, result)`: what the last stage makes of the model's output."""


def run_schedule(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[DataProto],
    prepare: Callable[[DataProto], MegatronInputs],
    finish: Finish,
    *,
    forward_only: bool,
) -> list[Any]:
    """Runs micro-batches through all pipeline stages, as Megatron schedules it. Collective.

    Args:
        chunks: of this rank's stage, in Megatron's wrapper for data parallelism.
        prepare: called for each micro-batch by each chunk.
        finish: called on the last stage.

    Returns:
        The results of `finish` in the order of the micro-batches; an empty list on other stages.
    """

    def step(batches: Iterator[DataProto], model: nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        micro_batch = next(batches)
        inputs = prepare(micro_batch)
        hidden_states = model(inputs.input_ids, inputs.position_ids, None, packed_seq_params=inputs.packed)
        return hidden_states, partial(finished, micro_batch, inputs)

    def finished(micro_batch: DataProto, inputs: MegatronInputs, hidden_states: torch.Tensor) -> tuple[Any, ...]:
        loss, result = finish(micro_batch, inputs, hidden_states)
        # No tokens: Megatron must not divide by their number, as the loss is normalized already.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

    batches = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=1,  # with variable lengths, stages tell each other the shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )


def is_last_stage() -> bool:
    """Whether the last layers are on this rank."""
    return parallel_state.is_pipeline_last_stage()
