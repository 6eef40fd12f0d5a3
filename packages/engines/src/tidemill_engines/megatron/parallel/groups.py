"""The process groups of a Megatron engine."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from tidemill_engines.distributed.agreement import describe, gather, raise_first, together
from tidemill_engines.distributed.default_group import join_default_group, leave_default_group
from tidemill_engines.megatron.config import ParallelConfig
from tidemill_engines.megatron.weights.names import Part, Placement

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronGroups:
    """What an engine communicates with besides Megatron.

    Attributes:
        control: gloo over all ranks, for plain data and error agreement.
        checkpoint: likewise, for checkpoints, which may be saved by another thread meanwhile.
        stages: gloo over the pipeline stages of this rank's model, the last one at its end.
        last_stage: gloo over all ranks that have the last layers; None on others.
        data_parallel: gloo over the ranks that work on different rows.
        tp, cp: Megatron's groups of tensor and context parallelism.
        shares_default: whether torch's default group is the engines'.
    """

    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup
    stages: dist.ProcessGroup
    last_stage: dist.ProcessGroup | None
    data_parallel: dist.ProcessGroup
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    shares_default: bool

    def from_last_stage(self, compute: Callable[[dist.ProcessGroup], T]) -> T:
        """On all stages what `compute`, given `last_stage`, returns on the last one; its error, too. Collective."""
        value, error = None, None
        if self.last_stage is not None:
            try:
                value = compute(self.last_stage)
            except Exception as caught:  # noqa: BLE001 - raised below, on every stage
                error = caught
        message = [(value, describe(error))]
        if (size := dist.get_world_size(self.stages)) > 1:
            dist.broadcast_object_list(message, group=self.stages, group_src=size - 1)
        value, described = message[0]
        last = dist.get_process_group_ranks(self.stages)[-1]
        raise_first([*[None] * last, described], error)
        assert value is not None
        return value


def make_groups(
    config: ParallelConfig, device: torch.device, check: Callable[[int], None], *, seed: int, timeout_s: float
) -> MegatronGroups:
    """Divides all ranks. Megatron keeps its groups as state of the process, so there is one division at a time.

    Args:
        check: called with the number of ranks before they are divided; what it raises on one rank, all raise.
        seed: of Megatron's random states, from which those of the ranks are derived.

    Raises:
        RuntimeError: there is a division already, or a default group without NCCL for ranks on GPUs.
    """
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("this process has a Megatron engine already, and Megatron keeps its groups once a process")
    timeout = timedelta(seconds=timeout_s)
    shares_default = join_default_group(device, timeout)
    try:
        return _divide(config, device, check, seed=seed, timeout=timeout, shares_default=shares_default)
    except BaseException:
        if shares_default:
            leave_default_group()
        raise


def _divide(
    config: ParallelConfig,
    device: torch.device,
    check: Callable[[int], None],
    *,
    seed: int,
    timeout: timedelta,
    shares_default: bool,
) -> MegatronGroups:
    if device.type == "cuda" and "nccl" not in dist.get_backend_config():
        raise RuntimeError(
            f"torch's default process group is {dist.get_backend_config()}, and Megatron makes its groups like it; "
            "initialize it with backend='cpu:gloo,cuda:nccl', or leave it to the engine"
        )
    everybody = list(range(dist.get_world_size()))
    control, for_checkpoints = _group(everybody, timeout), _group(everybody, timeout)
    try:
        with together(control):
            check(dist.get_world_size())
    except BaseException:
        for group in (control, for_checkpoints):
            dist.destroy_process_group(group)
        raise
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        distributed_timeout_minutes=timeout.total_seconds() / 60,  # type: ignore[arg-type] - a timedelta takes parts
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    stages: list[list[int]] = gather(
        dist.get_process_group_ranks(_checked(parallel_state.get_pipeline_model_parallel_group())), control
    )
    own_stages = None
    for ranks in sorted(set(map(tuple, stages))):
        group = _group(list(ranks), timeout)
        own_stages = group if dist.get_rank() in ranks else own_stages
    last = sorted({ranks[-1] for ranks in stages})
    last_stage = _group(last, timeout)
    assert own_stages is not None
    return MegatronGroups(
        control=control,
        checkpoint=for_checkpoints,
        stages=own_stages,
        last_stage=last_stage if dist.get_rank() in last else None,
        data_parallel=_checked(parallel_state.get_data_parallel_group_gloo()),
        tp=_checked(parallel_state.get_tensor_model_parallel_group()),
        cp=_checked(parallel_state.get_context_parallel_group()),
        shares_default=shares_default,
    )


def close_groups(groups: MegatronGroups) -> None:
    """Gives the groups up, and the default group if no other engine uses it."""
    made = parallel_state._global_process_group_list or []
    own = (groups.control, groups.checkpoint, groups.stages, groups.last_stage)
    for group in (*own, *made):  # Megatron would forget its groups and leave them alive, with the threads of each
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    if groups.shares_default:
        leave_default_group()


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


def _group(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group; every rank makes it, whether it is in it or not."""
    return dist.new_group(ranks, backend="gloo", timeout=timeout)  # type: ignore[return-value]


def _checked(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "this rank is not in its own group"
    return group
