"""The process groups of a Megatron engine."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tidemill_engines.distributed.agreement import all_gather, describe_error, raise_first_error, raise_on_all_ranks
from tidemill_engines.distributed.default_group import join_default_group, leave_default_group
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_engines.megatron.parallel.shared_groups import check_layout, join_megatron_groups, leave_megatron_groups
from tidemill_engines.megatron.weights.placement import Part, Placement

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronGroups:
    """Process groups of an engine, besides those that only Megatron uses.

    The engines of a process share `data_parallel`, `tp` and `cp`; the other groups belong to one engine.

    Attributes:
        control: gloo group of all ranks, for plain data and error agreement.
        checkpoint: gloo group of all ranks for checkpoints, which another thread may be saving.
        stages: gloo group of the pipeline stages of this rank's model, ordered by stage.
        last_stage: gloo group of all ranks with the last layers; None on others.
        data_parallel: gloo group of the ranks with different rows.
        tp, cp: Megatron's groups of tensor and context parallelism.
        created: destroys the engine's groups; closed by `close_groups`.
    """

    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup
    stages: dist.ProcessGroup
    last_stage: dist.ProcessGroup | None
    data_parallel: dist.ProcessGroup
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    created: ExitStack

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
    """Create the groups of an engine, or share those that Megatron keeps once per process. Collective over all ranks.

    Args:
        check: called with the number of ranks before groups are created; an error on one rank is raised on all.
        seed: seed of Megatron's random states, which differ between ranks; that of the first engine counts.

    Raises:
        RuntimeError: another engine of this process has another layout, or the default group has no NCCL for ranks on
            GPUs.
    """
    check_layout(config, device)
    timeout = timedelta(seconds=timeout_s)
    with ExitStack() as created:
        if join_default_group(device, timeout):
            created.callback(leave_default_group)
        return _create(config, device, check, created, seed=seed, timeout=timeout)


def _create(
    config: MegatronConfig,
    device: torch.device,
    check: Callable[[int], None],
    created: ExitStack,
    *,
    seed: int,
    timeout: timedelta,
) -> MegatronGroups:
    if device.type == "cuda" and "nccl" not in dist.get_backend_config():
        raise RuntimeError(
            "expected a default process group with NCCL for CUDA, because Megatron creates its groups like it, got "
            f"{dist.get_backend_config()}; initialize it with backend='cpu:gloo,cuda:nccl', or let the engine create it"
        )

    def new_group(ranks: list[int]) -> dist.ProcessGroup | None:
        """Create a gloo group; None on ranks outside of it. Collective over all ranks."""
        group = dist.new_group(ranks, backend="gloo", timeout=timeout)
        if not isinstance(group, dist.ProcessGroup):
            return None
        created.callback(dist.destroy_process_group, group)
        return group

    all_ranks = list(range(dist.get_world_size()))
    control, for_checkpoints = _checked(new_group(all_ranks)), _checked(new_group(all_ranks))
    with raise_on_all_ranks(control):
        check(dist.get_world_size())
    join_megatron_groups(config, device, seed=seed, timeout=timeout)
    created.callback(leave_megatron_groups)
    stages: list[list[int]] = all_gather(
        dist.get_process_group_ranks(_checked(parallel_state.get_pipeline_model_parallel_group())), control
    )
    of_stages = [new_group(list(ranks)) for ranks in sorted(set(map(tuple, stages)))]
    [own_stages] = [group for group in of_stages if group is not None]
    return MegatronGroups(
        control=control,
        checkpoint=for_checkpoints,
        stages=own_stages,
        last_stage=new_group(sorted({ranks[-1] for ranks in stages})),
        data_parallel=_checked(parallel_state.get_data_parallel_group_gloo()),
        tp=_checked(parallel_state.get_tensor_model_parallel_group()),
        cp=_checked(parallel_state.get_context_parallel_group()),
        created=created.pop_all(),
    )


def close_groups(groups: MegatronGroups) -> None:
    """Destroy the groups, except those that other engines use."""
    groups.created.close()


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


def _checked(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "this rank is not in its own group"
    return group
