"""Sharded checkpoints through torch.distributed.checkpoint."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from tidemill_engines.agreement import together

_FORMAT_VERSION = 1
_PROGRESS_FILE = "engine.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a checkpoint knows besides tensors.

    Attributes:
        step: calls of train_batch, which the schedule follows.
        skipped_steps: of them, those whose gradient was not finite.
        world_size: ranks that saved; random states are restored by as many ranks only.
        has_optimizer: whether optimizer state was saved.
    """

    step: int
    skipped_steps: int
    world_size: int
    has_optimizer: bool
    format_version: int = _FORMAT_VERSION


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """torch's random states of this process: uint8 tensors on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def save(path: Path, tensors: dict[str, torch.Tensor], progress: Progress, group: dist.ProcessGroup) -> None:
    """Writes the tensors (DTensors sharded) and, last, the file that says that the checkpoint is whole. Collective.

    Raises:
        OSError: a rank could not write; raised on every rank.
    """
    with together(group):
        path.mkdir(parents=True, exist_ok=True)
    try:
        state_dict_saver.save(tensors, storage_writer=FileSystemWriter(path), process_group=group)
    except CheckpointException as error:  # not an Exception for Python, so it would pass every handler of the caller
        free_mib = shutil.disk_usage(path).free >> 20  # torch.save reports a full disk as an odd position in the file
        raise OSError(
            f"could not save the checkpoint {path} ({free_mib} MiB are free there): {_reasons(error)}"
        ) from error
    with together(group):
        if dist.get_rank(group) == 0:
            (path / _PROGRESS_FILE).write_text(json.dumps(asdict(progress)) + "\n")


def read_progress(path: Path, group: dist.ProcessGroup) -> Progress:
    """Reads what `save` wrote last. Collective.

    Raises:
        FileNotFoundError: it is not there, so the checkpoint is not whole.
        ValueError: it is of another format version.
    """
    progress = None
    with together(group):
        file = path / _PROGRESS_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{path} is not a whole checkpoint: it has no {_PROGRESS_FILE}")
        fields = json.loads(file.read_text())
        if fields.get("format_version") != _FORMAT_VERSION:
            raise ValueError(
                f"{path} has checkpoint format {fields.get('format_version')!r}; this version reads {_FORMAT_VERSION}"
            )
        progress = Progress(**fields)
    assert progress is not None
    return progress


def load(path: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Reads into `tensors` in place; nothing is changed if names or shapes do not match. Collective.

    Raises:
        ValueError: the checkpoint is damaged or of another model; raised on every rank.
    """
    try:
        state_dict_loader.load(tensors, storage_reader=FileSystemReader(path), process_group=group)
    except CheckpointException as error:
        raise ValueError(f"could not load the checkpoint {path}: {_reasons(error)}") from error


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items()))
