"""The process groups of an FSDP2 engine: torch's default group, and the engine's own groups."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tidemill_engines.distributed.default_group import join_default_group, leave_default_group
from tidemill_engines.fsdp2.config import FSDP2Config

_mesh_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDP2Groups:
    """Process groups of an FSDP2 engine.

    Attributes:
        control: gloo group of all ranks, for plain data and errors.
        checkpoint: gloo group of all ranks, for checkpoints that another thread saves.
        mesh: mesh of the device: [shard] or [replicate, shard].
        num_replicas: number of ranks that hold the same shard of the model.
        data_parallel: gloo group of the ranks that work on different rows, each with the same part of its rows.
        sequence_parallel: device group of the consecutive ranks that share the tokens of the same rows; None if each
            rank works on whole rows.
        owned: groups to destroy when the engine closes.
        shares_default: whether an engine created torch's default group.
    """

    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup
    mesh: DeviceMesh
    num_replicas: int
    data_parallel: dist.ProcessGroup
    sequence_parallel: dist.ProcessGroup | None
    owned: Sequence[dist.ProcessGroup]
    shares_default: bool


def make_groups(config: FSDP2Config, device: torch.device) -> FSDP2Groups:
    """Create the groups of an engine. Collective over all ranks.

    Raises:
        ValueError: a size does not divide the world size (on every rank, before any collective).
    """
    timeout = timedelta(seconds=config.timeout_s)
    shares_default = join_default_group(device, timeout)
    try:
        groups = _divide(config, device, timeout)
    except BaseException:
        if shares_default:
            leave_default_group()
        raise
    return replace(groups, shares_default=shares_default)


def _divide(config: FSDP2Config, device: torch.device, timeout: timedelta) -> FSDP2Groups:
    world_size, sequence_parallel_size = dist.get_world_size(), config.ulysses_sequence_parallel_size
    config.check_world_size(world_size)
    shard_size = world_size if config.fsdp_size == -1 else config.fsdp_size
    control = _checked(dist.new_group(backend="gloo", timeout=timeout))
    checkpoint = _checked(dist.new_group(backend="gloo", timeout=timeout))
    backend = "gloo" if device.type == "cpu" else "nccl"
    ranks = torch.arange(world_size).view(-1, shard_size)

    def subgroup(rank_lists: list[list[int]], backend: str = backend) -> dist.ProcessGroup:
        group, _ = dist.new_subgroups_by_enumeration(rank_lists, timeout=timeout, backend=backend)
        return _checked(group)

    shard = subgroup(ranks.tolist())
    data_parallel, sequence_parallel, owned = control, None, [control, checkpoint, shard]
    if sequence_parallel_size > 1:
        by_rows = torch.arange(world_size).view(-1, sequence_parallel_size)
        sequence_parallel = subgroup(by_rows.tolist())
        data_parallel = subgroup(by_rows.T.tolist(), "gloo")
        owned += [sequence_parallel, data_parallel]
    # torch caches sharding decisions, with their groups, by ranks and names of the mesh. A unique name keeps a new mesh
    # from the destroyed groups of a closed engine.
    number = next(_mesh_numbers)
    if shard_size == world_size:
        mesh = DeviceMesh.from_group(shard, device.type, mesh_dim_names=(f"dp_shard_{number}",))
    else:
        replicate = subgroup(ranks.T.tolist())
        names = (f"dp_replicate_{number}", f"dp_shard_{number}")
        mesh = DeviceMesh.from_group([replicate, shard], device.type, ranks, mesh_dim_names=names)
        owned.append(replicate)
    return FSDP2Groups(
        control=control,
        checkpoint=checkpoint,
        mesh=mesh,
        num_replicas=world_size // shard_size,
        data_parallel=data_parallel,
        sequence_parallel=sequence_parallel,
        owned=owned,
        shares_default=False,
    )


def _checked(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "this rank is not in its own group"
    return group


def close_groups(groups: FSDP2Groups) -> None:
    """Destroy the groups of `make_groups`, and the default group if no other engine uses it."""
    for group in groups.owned:
        dist.destroy_process_group(group)
    if groups.shares_default:
        leave_default_group()
