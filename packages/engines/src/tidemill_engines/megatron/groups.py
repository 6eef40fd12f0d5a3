"""Megatron's process groups."""

from megatron.core import parallel_state, tensor_parallel

from tidemill_engines.megatron.config import ParallelConfig
from tidemill_engines.megatron.layout import Part, Placement


def make_groups(config: ParallelConfig, seed: int) -> None:
    """Divides all ranks; Megatron keeps the groups as state of the process, so there is one division at a time.

    Args:
        seed: of the random states, from which those of the ranks are derived.

    Raises:
        RuntimeError: there is a division already.
    """
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("this process has a Megatron engine already, and Megatron keeps its groups once a process")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def close_groups() -> None:
    """Gives the groups up; again does nothing."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def own_placement() -> Placement:
    """What this rank holds of each tensor."""
    etp_rank = parallel_state.get_expert_tensor_parallel_rank()
    etp_size = parallel_state.get_expert_tensor_parallel_world_size()
    assert etp_rank is not None, "make_groups() comes first"
    assert etp_size is not None
    return Placement(
        tp=Part(
            rank=parallel_state.get_tensor_model_parallel_rank(),
            size=parallel_state.get_tensor_model_parallel_world_size(),
        ),
        etp=Part(rank=etp_rank, size=etp_size),
        ep=Part(
            rank=parallel_state.get_expert_model_parallel_rank(),
            size=parallel_state.get_expert_model_parallel_world_size(),
        ),
    )
