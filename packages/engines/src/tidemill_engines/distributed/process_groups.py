"""The process groups of an engine: torch's default group where there is none yet, and the engine's own groups."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tidemill_engines.distributed.default_group import join_default_group, leave_default_group

_mesh_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGroups:
    """What an engine communicates with.

    Attributes:
        control: gloo over all ranks, for plain data and error agreement.
        checkpoint: likewise, for checkpoints, which may be saved by another thread meanwhile.
        mesh: of the device, [shard] or [replicate, shard].
        num_replicas: how many ranks hold the same shard of the model.
        data_parallel: gloo over the ranks that work on different rows, each with this rank's part of its rows.
        sequence_parallel: of the device, over the ranks that share the tokens of the same rows (consecutive ranks);
            None where each rank works on whole rows.
        owned: groups to destroy when the engine closes.
        shares_default: whether torch's default group is the engines'.
    """

    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup
    mesh: DeviceMesh
    num_replicas: int
    data_parallel: dist.ProcessGroup
    sequence_parallel: dist.ProcessGroup | None
    owned: Sequence[dist.ProcessGroup]
    shares_default: bool


def resolve_device(name: str) -> torch.device:
    """The device of this process: LOCAL_RANK picks the GPU where several are visible.

    Raises:
        RuntimeError: "cuda" without a usable CUDA device, or fewer devices than LOCAL_RANK asks for.
    """
    usable = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not usable):
        return torch.device("cpu")
    if not usable:
        raise RuntimeError("the engine's device is 'cuda' but torch sees no CUDA device; use 'auto' or 'cpu'")
    count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    index = 0 if count == 1 else local_rank  # a launcher that shows each process its own GPU leaves one visible
    if index >= count:
        raise RuntimeError(f"LOCAL_RANK is {local_rank} but torch sees {count} CUDA devices; start fewer processes")
    return torch.device("cuda", index)


def make_groups(
    device: torch.device, *, fsdp_size: int, sequence_parallel_size: int, timeout_s: float
) -> ProcessGroups:
    """Makes the groups of an engine. Collective over all ranks.

    Args:
        fsdp_size: ranks per sharded copy of the model; -1 means all.
        sequence_parallel_size: ranks that share the tokens of the same rows.

    Raises:
        ValueError: a size does not divide the world size (on every rank, before any collective).
    """
    timeout = timedelta(seconds=timeout_s)
    shares_default = join_default_group(device, timeout)
    try:
        groups = _divide(device, fsdp_size=fsdp_size, sequence_parallel_size=sequence_parallel_size, timeout=timeout)
    except BaseException:
        if shares_default:
            leave_default_group()
        raise
    return replace(groups, shares_default=shares_default)


def _divide(device: torch.device, *, fsdp_size: int, sequence_parallel_size: int, timeout: timedelta) -> ProcessGroups:
    world_size = dist.get_world_size()
    shard_size = world_size if fsdp_size == -1 else fsdp_size
    if world_size % shard_size:
        raise ValueError(f"EngineConfig.fsdp_size must divide the world size {world_size}; got {fsdp_size}")
    if world_size % sequence_parallel_size:
        raise ValueError(
            f"EngineConfig.ulysses_sequence_parallel_size must divide the world size {world_size}; "
            f"got {sequence_parallel_size}"
        )
    control = _checked(dist.new_group(backend="gloo", timeout=timeout))
    checkpoint = _checked(dist.new_group(backend="gloo", timeout=timeout))
    backend = "gloo" if device.type == "cpu" else "nccl"
    ranks = torch.arange(world_size).view(-1, shard_size)

    def subgroup(rank_lists: list[list[int]], backend: str = backend) -> dist.ProcessGroup:
        group, _ = dist.new_subgroups_by_enumeration(rank_lists, timeout=timeout, backend=backend)
        return _checked(group)

    shard = subgroup(ranks.tolist())
    data_parallel, sequence_parallel, own = control, None, [control, checkpoint, shard]
    if sequence_parallel_size > 1:
        by_rows = torch.arange(world_size).view(-1, sequence_parallel_size)
        sequence_parallel = subgroup(by_rows.tolist())
        data_parallel = subgroup(by_rows.T.tolist(), "gloo")
        own += [sequence_parallel, data_parallel]
    # torch caches sharding decisions, with the groups in them, by the equality of meshes, which looks at ranks and
    # names: without a name of its own, a mesh would meet the groups of an engine that has been closed.
    number = next(_mesh_numbers)
    if shard_size == world_size:
        mesh = DeviceMesh.from_group(shard, device.type, mesh_dim_names=(f"dp_shard_{number}",))
    else:
        replicate = subgroup(ranks.T.tolist())
        names = (f"dp_replicate_{number}", f"dp_shard_{number}")
        mesh = DeviceMesh.from_group([replicate, shard], device.type, ranks, mesh_dim_names=names)
        own.append(replicate)
    return ProcessGroups(
        control=control,
        checkpoint=checkpoint,
        mesh=mesh,
        num_replicas=world_size // shard_size,
        data_parallel=data_parallel,
        sequence_parallel=sequence_parallel,
        owned=own,
        shares_default=False,
    )


def _checked(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "this rank is not in its own group"
    return group


def close_groups(groups: ProcessGroups) -> None:
    """Destroys what `make_groups` made: its own groups, and the default group if no other engine uses it."""
    for group in groups.owned:
        dist.destroy_process_group(group)
    if groups.shares_default:
        leave_default_group()
