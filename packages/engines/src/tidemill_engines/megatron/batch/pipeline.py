"""Megatron's pipeline schedules, run on the micro-batches of a batch."""

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
"""`(micro_batch, inputs, hidden_states) -> (loss, result)`, called on the last stage with the model's output."""


def run_schedule(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[DataProto],
    prepare: Callable[[DataProto], MegatronInputs],
    finish: Finish,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run micro-batches through all pipeline stages with Megatron's schedule. Collective.

    Args:
        chunks: model chunks of this rank's stage, in Megatron's data-parallel wrapper.
        prepare: returns the inputs of a micro-batch; called by each chunk.
        finish: called on the last stage.

    Returns:
        Results of `finish` in the order of the micro-batches; an empty list on other stages.
    """

    def step(batches: Iterator[DataProto], model: nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        micro_batch = next(batches)
        inputs = prepare(micro_batch)
        hidden_states = model(inputs.input_ids, inputs.position_ids, None, packed_seq_params=inputs.packed)
        return hidden_states, partial(finished, micro_batch, inputs)

    def finished(micro_batch: DataProto, inputs: MegatronInputs, hidden_states: torch.Tensor) -> tuple[Any, ...]:
        loss, result = finish(micro_batch, inputs, hidden_states)
        # Zero tokens: the loss is normalized already, so Megatron must not divide by the number of tokens.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

    batches = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=1,  # not used: with variable lengths, stages send the shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )


def is_last_stage() -> bool:
    """Whether this rank has the last layers."""
    return parallel_state.is_pipeline_last_stage()
