"""Save and load tensors with torch.distributed.checkpoint: sharded, and loadable in any layout."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tidemill_engines.checkpoint.folder import Progress, reasons, save_folder, write_tensors
from tidemill_engines.checkpoint.host_memory import host_copies
from tidemill_engines.distributed.agreement import raise_on_all_ranks
from tidemill_engines.offload import like, local_part


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return torch's random states of this process: uint8 tensors on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def snapshot(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy this rank's shards to the CPU, so training can continue while they are saved."""
    copies = host_copies([local_part(tensor) for tensor in tensors.values()])
    return {name: like(tensor, copy) for (name, tensor), copy in zip(tensors.items(), copies, strict=True)}


def save(
    path: str,
    tensors: dict[str, torch.Tensor],
    progress: Progress,
    group: dist.ProcessGroup,
    *,
    keep_last: int | None,
) -> None:
    """Write the tensors (DTensors sharded) to a new folder, completely or not at all. Collective over `group` (gloo).

    Args:
        path: absolute path or URL of the folder.

    Raises:
        OSError: a rank could not write; raised on every rank.
    """

    def write(folder: Path) -> list[str]:
        write_tensors(folder, tensors, group)
        rank = dist.get_rank(group)
        return [*(file.name for file in folder.glob(f"__{rank}_*")), *([".metadata"] if rank == 0 else [])]

    save_folder(path, write, progress, group, keep_last=keep_last)


def load(
    path: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup, *, if_saved: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Load into `tensors` in place; nothing changes if names or shapes do not match. Collective.

    Args:
        if_saved: additional tensors to load if the checkpoint contains them.

    Returns:
        The tensors of `if_saved` that the checkpoint contains.

    Raises:
        ValueError: the checkpoint is of another model; raised on every rank.
    """
    with raise_on_all_ranks(group):
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        more = {name: tensor for name, tensor in if_saved.items() if name in saved}
        if extra := sorted(name for name in saved if name.startswith("model.") and name not in tensors):
            raise ValueError(
                f"could not load the checkpoint {path}: it is of another model, which also has "
                f"{extra[0].removeprefix('model.')}; use an engine with the same model"
            )
    try:
        state_dict_loader.load(tensors | more, storage_reader=FileSystemReader(path), process_group=group)
    except CheckpointException as error:
        raise ValueError(
            f"could not load the checkpoint {path}: {reasons(error)}; use an engine with the same model and optimizer"
        ) from error
    return more
