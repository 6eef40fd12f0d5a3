"""Checkpoint folders: complete or absent, with a manifest of their files, and verified before they are read."""

import errno
import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner

from tidemill_engines.distributed.agreement import all_gather, raise_on_all_ranks
from tidemill_engines.location import (
    TEMPORARY,
    download,
    file_system,
    is_url,
    read_json,
    remove,
    reported,
    sizes,
    split,
    written_to,
)

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
        lora_alpha: `LoraConfig.alpha` of the adapters, whose other settings the tensors show; None without adapters.
    """

    step: int
    skipped_steps: int
    world_size: int
    has_optimizer: bool
    lora_alpha: float | None = None


def save_folder(
    location: str,
    write: Callable[[Path], Iterable[str]],
    progress: Progress,
    group: dist.ProcessGroup,
    *,
    keep_last: int | None = None,
) -> None:
    """Let all ranks write a new checkpoint. Collective.

    They write to a hidden folder next to `location`, which is renamed when it is complete. At a URL, where folders
    cannot be renamed, a checkpoint is complete when it has a manifest, which is written last.

    Args:
        location: absolute path or URL.
        write: writes this rank's files into a folder; returns their names.
        keep_last: number of complete checkpoints to keep in the parent folder, including this one; None keeps all.

    Raises:
        OSError: `location` exists, or a rank could not write; on every rank. The hidden folder is removed; a URL keeps
            the files that were written.
    """
    parent, name = split(location)
    partial = location if is_url(location) else f"{parent}/.{name}.partial"
    is_first = dist.get_rank(group) == 0
    with raise_on_all_ranks(group):
        with reported(f"read {location}"):
            exists = file_system(location).exists(f"{location}/{MANIFEST}" if is_url(location) else location)
        if exists:
            raise FileExistsError(f"{location} exists already; save to a new folder, or remove it first")
        if is_first and not is_url(location):
            shutil.rmtree(partial, ignore_errors=True)
            os.makedirs(partial)
    try:
        with ExitStack() as stack:
            with raise_on_all_ranks(group):
                folder = stack.enter_context(written_to(partial))
            with raise_on_all_ranks(group):  # all ranks finish writing before the first rank may remove the folder
                own = {each: [(folder / each).stat().st_size, _checksum(folder / each)] for each in write(folder)}
                for each in own:
                    _to_disk(folder / each)
            with raise_on_all_ranks(group):
                stack.close()  # uploads the files
        files = {each: entry for of_rank in all_gather(own, group) for each, entry in of_rank.items()}
        with raise_on_all_ranks(group):
            if is_first:
                _complete(location, partial, files, progress)
    except BaseException:
        if is_first and not is_url(location):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    with raise_on_all_ranks(group):
        if is_first and keep_last is not None:
            others = [other for other in whole_checkpoints(parent) if other != name]
            for old in others[: max(0, len(others) + 1 - keep_last)]:
                remove(f"{parent}/{old}", first=MANIFEST)


def _complete(location: str, partial: str, files: dict[str, Any], progress: Progress) -> None:
    manifest = {
        "format_version": FORMAT_VERSION,
        "saved_ns": time.time_ns(),
        "progress": asdict(progress),
        "files": files,
    }
    with written_to(partial) as folder:
        (folder / MANIFEST).write_text(json.dumps(manifest) + "\n")
        _to_disk(folder / MANIFEST)
        _to_disk(folder)
    if partial != location:
        os.rename(partial, location)
        _to_disk(Path(location).parent)


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


@contextmanager
def opened(location: str, group: dist.ProcessGroup, *, with_optimizer: bool) -> Iterator[tuple[Path, Progress]]:
    """Verify a checkpoint, and yield a folder with its files and its progress. Collective.

    The folder is that of the checkpoint, or for a URL a copy on each host, which is removed after the block.

    Args:
        location: absolute path or URL.
        with_optimizer: whether the checkpoint must contain optimizer state.

    Raises:
        FileNotFoundError: `location` or one of its files is missing.
        ValueError: a file is truncated or changed, the format version is unknown, or the optimizer state is missing.
            If a file is missing or damaged, the message names the newest complete checkpoint in the same folder.
    """
    manifest: dict[str, Any] = {}
    with raise_on_all_ranks(group), _with_advice(location):
        manifest = _read_whole(location)
    progress = Progress(**manifest["progress"])
    if with_optimizer and not progress.has_optimizer:
        raise ValueError(
            f"{location} has no optimizer state, as it was saved by an engine without an optimizer; load a checkpoint "
            "of a training engine, or create this engine without an optimizer"
        )
    with _folder_of(location, group) as (folder, rank, num_ranks):
        with raise_on_all_ranks(group), _with_advice(location):
            own = sorted(manifest["files"])[rank::num_ranks]
            if is_url(location):
                download(location, own, folder)
            for name in own:
                if _checksum(folder / name) != manifest["files"][name][1]:
                    raise ValueError(f"{location}/{name} is damaged: its contents have changed")
        try:
            yield folder, progress
        except ValueError as error:
            if not is_url(location):
                raise
            raise ValueError(str(error).replace(str(folder), location)) from error


@contextmanager
def _folder_of(location: str, group: dist.ProcessGroup) -> Iterator[tuple[Path, int, int]]:
    """Yield the folder of a checkpoint, or for a URL a new one on each host. Collective.

    Yields:
        The folder, the number of this rank among those that share it, and how many they are.
    """
    if not is_url(location):
        yield Path(location), dist.get_rank(group), dist.get_world_size(group)
        return
    hosts = all_gather(socket.gethostname(), group)
    ranks = [rank for rank, host in enumerate(hosts) if host == socket.gethostname()]
    index = ranks.index(dist.get_rank(group))
    with ExitStack() as stack:
        own = ""
        with raise_on_all_ranks(group):
            if index == 0:
                own = stack.enter_context(TemporaryDirectory(prefix=TEMPORARY))
        yield Path(all_gather(own, group)[ranks[0]]), index, len(ranks)
        dist.barrier(group)  # the others still read it


@contextmanager
def _with_advice(location: str) -> Iterator[None]:
    """Add the newest complete checkpoint in the same folder to an error."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        parent, own = split(location)
        others = [name for name in whole_checkpoints(parent) if name != own]
        if not others:  # the caller may have others in another order of folders
            raise
        raise type(error)(f"{error}; the newest complete checkpoint is {parent}/{others[-1]}") from error


def whole_checkpoints(parent: str) -> list[str]:
    """Return the names of the checkpoints in a folder with all files in their original size.

    They are in the order of saving.
    """
    found = []
    for name in sizes(parent):
        if name.startswith("."):
            continue
        try:
            manifest = _read_whole(f"{parent}/{name}")
        except (OSError, ValueError):  # incomplete, or no checkpoint
            continue
        # Steps do not give the order: they restart with each phase, and go back when training resumes.
        found.append((manifest["saved_ns"], name))
    return [name for _, name in sorted(found)]


def _read_whole(location: str) -> dict[str, Any]:
    """Return the manifest of a checkpoint after checking that all of its files exist with their original size."""
    file = f"{location}/{MANIFEST}"
    found = sizes(location)
    if MANIFEST not in found:
        raise FileNotFoundError(f"{location} is not a complete checkpoint: it lacks {MANIFEST}")
    manifest = read_json(file)
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{location} has checkpoint format {version!r}; this version supports {FORMAT_VERSION}")
    for name, (size, _) in manifest["files"].items():
        if name not in found:
            raise FileNotFoundError(f"{location} is not a complete checkpoint: it lacks {name}")
        if found[name] != size:
            raise ValueError(f"{location}/{name} is damaged: expected {size} bytes, found {found[name]}")
    return manifest


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
