"""The process groups of an engine: torch's default group where there is none yet, and the engine's own groups."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_mesh_numbers = itertools.count()
_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
        owned: groups to destroy when the engine closes; the first is torch's default group if the engine made it.
    """

    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup
    mesh: DeviceMesh
    num_replicas: int
    data_parallel: dist.ProcessGroup
    sequence_parallel: dist.ProcessGroup | None
    owned: Sequence[dist.ProcessGroup | None]


def resolve_device(name: str) -> torch.device:
    """The device of this process: LOCAL_RANK picks the GPU where several are visible.

    Raises:
        RuntimeError: "cuda" without a usable CUDA device, or fewer devices than LOCAL_RANK asks for.
    """
    usable = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not usable):
        return torch.device("cpu")
    if not usable:
        raise RuntimeError("EngineConfig.device is 'cuda' but torch sees no CUDA device; use 'auto' or 'cpu'")
    count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    index = 0 if count == 1 else local_rank  # a launcher that shows each process its own GPU leaves one visible
    if index >= count:
        raise RuntimeError(f"LOCAL_RANK is {local_rank} but torch sees {count} CUDA devices; start fewer processes")
    return torch.device("cuda", index)


def init_default_group(device: torch.device, timeout: timedelta) -> bool:
    """Makes torch's default process group from the environment, or of this process alone, unless there is one.

    Returns:
        Whether it was made here (and is to be destroyed here).

    Raises:
        ValueError: the environment names a rank but not all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    if dist.is_initialized():
        return False
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return True
    missing = [name for name in _ENV if name not in os.environ]
    if missing:
        raise ValueError(
            f"expected {', '.join(_ENV)} in the environment; {', '.join(missing)} not set. Start with torchrun, set "
            "them all, or unset RANK and WORLD_SIZE to run as one process"
        )
    dist.init_process_group(backend, timeout=timeout)
    return True


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
    made_default = init_default_group(device, timeout)
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
        owned=[None, *own] if made_default else own,
    )


def _checked(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "this rank is not in its own group"
    return group


def close_groups(groups: ProcessGroups) -> None:
    """Destroys what `make_groups` made: its own groups, and the default group (with all others) if it made that."""
    if groups.owned[0] is None:
        dist.destroy_process_group()
        return
    for group in groups.owned:
        dist.destroy_process_group(group)
