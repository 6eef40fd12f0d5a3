"""The process groups of a Megatron engine."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from tidemill_engines.distributed.agreement import all_gather, describe_error, raise_first_error, raise_on_all_ranks
from tidemill_engines.distributed.default_group import join_default_group, leave_default_group
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_engines.megatron.weights.placement import Part, Placement

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronGroups:
    """Process groups of an engine, besides those that only Megatron uses.

    Attributes:
        control: gloo group of all ranks, for plain data and error agreement.
        checkpoint: gloo group of all ranks for checkpoints, which another thread may be saving.
        stages: gloo group of the pipeline stages of this rank's model, ordered by stage.
        last_stage: gloo group of all ranks with the last layers; None on others.
        data_parallel: gloo group of the ranks with different rows.
        tp, cp: Megatron's groups of tensor and context parallelism.
        shares_default: whether torch's default group was created by an engine.
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
        """Call `compute(last_stage)` on the last stage; return its result or raise its error on all. Collective."""
        value, error = None, None
        if self.last_stage is not None:
            try:
                value = compute(self.last_stage)
            except Exception as caught:  # noqa: BLE001 - raised below, on every stage
                error = caught
        message = [(value, describe_error(error))]
        if (size := dist.get_world_size(self.stages)) > 1:
            dist.broadcast_object_list(message, group=self.stages, group_src=size - 1)
        value, described = message[0]
        last = dist.get_process_group_ranks(self.stages)[-1]
        raise_first_error([*[None] * last, described], error)
        assert value is not None
        return value


def make_groups(
    config: MegatronConfig, device: torch.device, check: Callable[[int], None], *, seed: int, timeout_s: float
) -> MegatronGroups:
    """Create the groups of all ranks. Megatron keeps its groups as state of the process, so they exist once at a time.

    Args:
        check: called with the number of ranks before groups are created; an error on one rank is raised on all.
        seed: seed of Megatron's random states, which differ between ranks.

    Raises:
        RuntimeError: groups exist already, or the default group has no NCCL for ranks on GPUs.
    """
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError(
            "expected no other Megatron engine in this process, because Megatron keeps its groups once per process; "
            "close() the other engine first, or use another process"
        )
    timeout = timedelta(seconds=timeout_s)
    shares_default = join_default_group(device, timeout)
    try:
        return _create(config, device, check, seed=seed, timeout=timeout, shares_default=shares_default)
    except BaseException:
        if shares_default:
            leave_default_group()
        raise


def _create(
    config: MegatronConfig,
    device: torch.device,
    check: Callable[[int], None],
    *,
    seed: int,
    timeout: timedelta,
    shares_default: bool,
) -> MegatronGroups:
    if device.type == "cuda" and "nccl" not in dist.get_backend_config():
        raise RuntimeError(
            "expected a default process group with NCCL for CUDA, because Megatron creates its groups like it, got "
            f"{dist.get_backend_config()}; initialize it with backend='cpu:gloo,cuda:nccl', or let the engine create it"
        )
    all_ranks = list(range(dist.get_world_size()))
    control, for_checkpoints = _group(all_ranks, timeout), _group(all_ranks, timeout)
    try:
        with raise_on_all_ranks(control):
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
        distributed_timeout_minutes=timeout.total_seconds() / 60,  # type: ignore[arg-type] - a timedelta accepts a float
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    stages: list[list[int]] = all_gather(
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
    """Destroy the groups, and the default group if no other engine uses it."""
    made = parallel_state._global_process_group_list or []
    own = (groups.control, groups.checkpoint, groups.stages, groups.last_stage)
    for group in (*own, *made):  # Megatron only drops its references, which leaves the groups' threads running
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    if groups.shares_default:
        leave_default_group()


def own_placement() -> Placement:
    """Placement of this rank."""
    etp_rank = parallel_state.get_expert_tensor_parallel_rank()
    etp_size = parallel_state.get_expert_tensor_parallel_world_size()
    assert etp_rank is not None, "make_groups() was not called"
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
    """Create a gloo group. Collective over all ranks, also those outside the group."""
    return dist.new_group(ranks, backend="gloo", timeout=timeout)  # type: ignore[return-value]


def _checked(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "this rank is not in its own group"
    return group
