"""Checkpoints as folders: each appears whole or not at all, says what is in it, and is checked before it is read."""

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


def save_folder(
    path: Path,
    write: Callable[[Path], Iterable[str]],
    progress: Progress,
    group: dist.ProcessGroup,
    *,
    keep_last: int | None = None,
) -> None:
    """Has all ranks write into a hidden folder beside `path`, and renames it once it is whole. Collective.

    Args:
        write: given that folder; returns the names of the files there that this rank wrote.
        keep_last: how many whole checkpoints stay in the folder around `path`: this one and those saved last before it.

    Raises:
        OSError: `path` exists, or a rank could not write; on every rank. Nothing of it is left.
    """
    partial = path.parent / f".{path.name}.partial"
    is_first = dist.get_rank(group) == 0
    with raise_on_all_ranks(group):
        if path.exists():
            raise FileExistsError(f"{path} exists already; save to a new folder or remove it first")
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    try:
        with raise_on_all_ranks(group):  # all ranks have left the folder before the first of them removes it
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
                (old / MANIFEST).unlink()  # first, so that half a checkpoint is never taken for a whole one
                shutil.rmtree(old)


def write_tensors(
    folder: Path, tensors: dict[str, Any], group: dist.ProcessGroup, planner: SavePlanner | None = None
) -> None:
    """Writes tensors with torch.distributed.checkpoint. Collective over `group` (gloo).

    Raises:
        OSError: a rank could not write; raised on every rank.
    """
    try:
        state_dict_saver.save(tensors, storage_writer=FileSystemWriter(folder), planner=planner, process_group=group)
    except CheckpointException as error:  # not an Exception for Python, so it would pass every handler above
        raise _not_written(folder, reasons(error)) from error


def write_object(file: Path, value: Any) -> None:
    """`torch.save`.

    Raises:
        OSError: it could not be written.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        raise _not_written(file.parent, repr(error)) from error


def _not_written(folder: Path, why: str) -> OSError:
    free_mib = shutil.disk_usage(folder).free >> 20  # torch reports a full disk as an odd file position
    return OSError(f"could not save to {folder} ({free_mib} MiB are free there): {why}")


def reasons(error: CheckpointException) -> str:
    """What went wrong on which rank, without the tracebacks."""
    return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items()))


def read_progress(path: Path, group: dist.ProcessGroup, *, with_optimizer: bool) -> Progress:
    """Reads what a checkpoint says of itself and that its files are as they were written. Collective.

    Args:
        with_optimizer: whether an optimizer is to go on from it.

    Raises:
        FileNotFoundError: it is not whole: `path` or a file of it is missing.
        ValueError: a file was cut off or changed, or the format is of another version. Both name the newest whole
            checkpoint beside it, if there is one. Or it lacks the optimizer that is wanted.
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
        raise ValueError(f"{path} was saved by an engine without an optimizer, so training cannot continue from it")
    return progress


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder whose files are all there and as long as they were, in the order of saving."""
    found = []
    for manifest_file in folder.glob(f"[!.]*/{MANIFEST}"):
        path = manifest_file.parent
        try:
            manifest = _read_whole(path)
        except (FileNotFoundError, ValueError):  # not whole, which is what is asked here
            continue
        # Steps do not tell: they start anew with each phase, and go back where training does.
        found.append((manifest.get("saved_ns", manifest_file.stat().st_mtime_ns), path))
    return [path for _, path in sorted(found)]


def _read_whole(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that has all of its files, each as long as it was."""
    file = path / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(f"{path} is not a whole checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(file.read_text())
        version = manifest["format_version"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has checkpoint format {version!r}; this version reads {FORMAT_VERSION}")
    for name, (size, _) in manifest["files"].items():
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} is not a whole checkpoint: it lacks {name}")
        actual = (path / name).stat().st_size
        if actual != size:
            raise ValueError(f"{path / name} is damaged: it has {actual} bytes, {size} were written")
    return manifest


def _advice(path: Path) -> str:
    others = [other for other in whole_checkpoints(path.parent) if other != path]
    return f"the newest whole checkpoint is {others[-1]}" if others else "there is no whole one beside it"


def _to_disk(path: Path) -> None:
    """Has a file, or what a folder lists, survive a loss of power from now on."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:  # some network filesystems have no fsync of folders, whose names they write at once
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
