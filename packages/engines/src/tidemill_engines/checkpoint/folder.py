"""Checkpoint folders: atomic to create, with a manifest of their files, and verified before they are read."""

import errno
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner

from tidemill_engines.distributed.agreement import all_gather, raise_on_all_ranks

MANIFEST = "engine.json"
FORMAT_VERSION = 2
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The state of a checkpoint besides tensors.

    Attributes:
        step: position in the learning-rate schedule.
        skipped_steps: number of steps that were skipped because the gradient was not finite.
        world_size: number of ranks that saved; random states are restored only on the same number of ranks.
        has_optimizer: whether the checkpoint contains optimizer state.
    """

    step: int
    skipped_steps: int
    world_size: int
    has_optimizer: bool


def save_folder(
    path: Path,
    write: Callable[[Path], Iterable[str]],
    progress: Progress,
    group: dist.ProcessGroup,
    *,
    keep_last: int | None = None,
) -> None:
    """Let all ranks write into a hidden folder next to `path`, and rename it when it is complete. Collective.

    Args:
        write: writes this rank's files into a folder; returns their names.
        keep_last: number of complete checkpoints to keep in the parent folder, including this one; None keeps all.

    Raises:
        OSError: `path` exists, or a rank could not write; on every rank. The hidden folder is removed.
    """
    partial = path.parent / f".{path.name}.partial"
    is_first = dist.get_rank(group) == 0
    with raise_on_all_ranks(group):
        if path.exists():
            raise FileExistsError(f"{path} exists already; save to a new folder, or remove it first")
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    try:
        with raise_on_all_ranks(group):  # all ranks finish writing before the first rank may remove the folder
            written = write(partial)
            own = {name: [(partial / name).stat().st_size, _checksum(partial / name)] for name in written}
            for name in own:
                _to_disk(partial / name)
        files = {name: entry for of_rank in all_gather(own, group) for name, entry in of_rank.items()}
        with raise_on_all_ranks(group):
            if is_first:
                manifest = {
                    "format_version": FORMAT_VERSION,
                    "saved_ns": time.time_ns(),
                    "progress": asdict(progress),
                    "files": files,
                }
                (partial / MANIFEST).write_text(json.dumps(manifest) + "\n")
                _to_disk(partial / MANIFEST)
                _to_disk(partial)
                partial.rename(path)
    except BaseException:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    with raise_on_all_ranks(group):
        if is_first:
            _to_disk(path.parent)
        if is_first and keep_last is not None:
            others = [other for other in whole_checkpoints(path.parent) if other != path]
            for old in others[: max(0, len(others) + 1 - keep_last)]:
                (old / MANIFEST).unlink()  # first, so an interrupted removal does not leave a seemingly complete one
                shutil.rmtree(old)


def write_tensors(
    folder: Path, tensors: dict[str, Any], group: dist.ProcessGroup, planner: SavePlanner | None = None
) -> None:
    """Write tensors with torch.distributed.checkpoint. Collective over `group` (gloo).

    Raises:
        OSError: a rank could not write; raised on every rank.
    """
    try:
        state_dict_saver.save(tensors, storage_writer=FileSystemWriter(folder), planner=planner, process_group=group)
    except CheckpointException as error:  # derives from BaseException, so callers would not catch it
        raise _not_written(folder, reasons(error)) from error


def write_object(file: Path, value: Any) -> None:
    """Write an object with `torch.save`.

    Raises:
        OSError: the write failed.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        raise _not_written(file.parent, repr(error)) from error


def _not_written(folder: Path, why: str) -> OSError:
    free_mib = shutil.disk_usage(folder).free >> 20  # torch reports a full disk as an unexpected file position
    return OSError(f"could not save to {folder} ({free_mib} MiB free); check its free space and permissions: {why}")


def reasons(error: CheckpointException) -> str:
    """Format the error of each rank, without tracebacks."""
    return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items()))


def read_progress(path: Path, group: dist.ProcessGroup, *, with_optimizer: bool) -> Progress:
    """Read the progress of a checkpoint and verify the checksums of its files. Collective.

    Args:
        with_optimizer: whether the checkpoint must contain optimizer state.

    Raises:
        FileNotFoundError: `path` or one of its files is missing.
        ValueError: a file is truncated or changed, the format version is unknown, or the optimizer state is missing.
            If a file is missing or damaged, the message names the newest complete checkpoint in the same folder.
    """
    progress = None
    with raise_on_all_ranks(group):
        try:
            manifest = _read_whole(path)
            for name in sorted(manifest["files"])[dist.get_rank(group) :: dist.get_world_size(group)]:
                if _checksum(path / name) != manifest["files"][name][1]:
                    raise ValueError(f"{path / name} is damaged: its contents have changed")
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{error}; {_advice(path)}") from error
        progress = Progress(**manifest["progress"])
    assert progress is not None
    if with_optimizer and not progress.has_optimizer:
        raise ValueError(
            f"{path} has no optimizer state, as it was saved by an engine without an optimizer; load a checkpoint of a "
            "training engine, or create this engine without an optimizer"
        )
    return progress


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder whose files all exist with their original size, in the order of saving."""
    found = []
    for manifest_file in folder.glob(f"[!.]*/{MANIFEST}"):
        path = manifest_file.parent
        try:
            manifest = _read_whole(path)
        except (FileNotFoundError, ValueError):  # incomplete
            continue
        # Steps do not give the order: they restart with each phase, and go back when training resumes.
        found.append((manifest.get("saved_ns", manifest_file.stat().st_mtime_ns), path))
    return [path for _, path in sorted(found)]


def _read_whole(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint after checking that all of its files exist with their original size."""
    file = path / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(f"{path} is not a complete checkpoint: it lacks {MANIFEST}")
    try:
        manifest = json.loads(file.read_text())
        version = manifest["format_version"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has checkpoint format {version!r}; this version supports {FORMAT_VERSION}")
    for name, (size, _) in manifest["files"].items():
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} is not a complete checkpoint: it lacks {name}")
        actual = (path / name).stat().st_size
        if actual != size:
            raise ValueError(f"{path / name} is damaged: expected {size} bytes, found {actual}")
    return manifest


def _advice(path: Path) -> str:
    others = [other for other in whole_checkpoints(path.parent) if other != path]
    if not others:
        return f"{path.parent} has no other complete checkpoint"
    return f"the newest complete checkpoint is {others[-1]}"


def _to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:  # some network filesystems do not support fsync of folders, and need none
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(opened)


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
