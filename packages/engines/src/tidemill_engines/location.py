"""Where checkpoints are: folders, or fsspec URLs such as s3://bucket/folder."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

TEMPORARY = "tidemill-checkpoint-"
"""Start of the names of temporary folders with files of URLs."""


def is_url(location: str | Path) -> bool:
    return "://" in str(location)


def absolute(location: str | Path) -> str:
    """Return a location that means the same in all processes: an absolute path, or a URL without a final slash.

    Raises:
        ValueError: a `Path` of a URL, which lacks one of its slashes.
    """
    if isinstance(location, Path) and location.parts[:1] and location.parts[0].endswith(":"):
        raise ValueError(f"expected a path, or a URL as text, got Path({str(location)!r}); use a str")
    return str(location).rstrip("/") if is_url(location) else os.path.abspath(location)


def split(location: str) -> tuple[str, str]:
    """Return the parent of a location and its name in it."""
    parent, _, name = location.rpartition("/")
    return parent, name


def file_system(location: str) -> fsspec.AbstractFileSystem:
    """Return the file system of a location, without listings that it had cached: other processes write there, too.

    Raises:
        ValueError: the protocol of a URL is unknown.
        ImportError: the package of its protocol is not installed.
    """
    if not is_url(location):
        return LocalFileSystem()
    options = {"auto_mkdir": True} if location.startswith("file:") else {}  # others have no folders, or create them
    system, _ = fsspec.url_to_fs(location, **options)
    system.invalidate_cache()
    return system


def sizes(location: str) -> dict[str, int | None]:
    """Return the sizes of the files in a folder by name; those of folders are undefined. Empty if it does not exist.

    Raises:
        OSError: it cannot be read.
    """
    with reported(f"read {location}"):
        try:
            entries = file_system(location).ls(location, detail=True)
        except FileNotFoundError:
            return {}
    return {entry["name"].rstrip("/").split("/")[-1]: entry["size"] for entry in entries}


@contextmanager
def written_to(location: str, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a folder whose files are in `location` after the block.

    It is the folder itself, which is created, or for a URL a temporary one, which is uploaded.

    Args:
        location: path or URL of the folder.
        temporary: parent of the temporary folder; None: TMPDIR.

    Raises:
        OSError: the upload failed.
    """
    if not is_url(location):
        Path(location).mkdir(parents=True, exist_ok=True)
        yield Path(location)
        return
    with TemporaryDirectory(prefix=TEMPORARY, dir=temporary) as name:
        yield Path(name)
        files = [str(path) for path in Path(name).rglob("*") if path.is_file()]
        with reported(f"write to {location}"):
            file_system(location).put(files, [location + file.removeprefix(name) for file in files])


@contextmanager
def read_from(location: str, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a folder with the files of `location`: the folder itself, or for a URL a temporary one; see `written_to`.

    Raises:
        OSError: the download failed.
    """
    if not is_url(location):
        yield Path(location)
        return
    with TemporaryDirectory(prefix=TEMPORARY, dir=temporary) as name:
        download(location, sizes(location), Path(name))
        yield Path(name)


def download(location: str, names: Iterable[str], folder: Path) -> None:
    """Download these files of a folder at a URL to `folder`.

    Raises:
        OSError: the download failed.
    """
    names = list(names)
    with reported(f"read {location}"):
        file_system(location).get([f"{location}/{name}" for name in names], [str(folder / name) for name in names])


def read_text(file: str) -> str:
    """Read a file at a path or URL.

    Raises:
        OSError: it cannot be read.
    """
    with reported(f"read {file}"):
        content = file_system(file).cat_file(file)
    assert isinstance(content, bytes)
    return content.decode()


def read_json(file: str) -> dict[str, Any]:
    """Read a JSON object from a file at a path or URL.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    try:
        return json.loads(read_text(file))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def write_text(file: str, text: str) -> None:
    """Write a file at a path or URL, whose folder is created. It appears when it is complete, and on the disk.

    Raises:
        OSError: it cannot be written.
    """
    with reported(f"write to {file}"):
        if is_url(file):
            file_system(file).pipe_file(file, text.encode())
            return
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(f"{file}.partial", "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(f"{file}.partial", file)


def remove(location: str, *, first: str) -> None:
    """Remove a folder, beginning with the file `first`, so that it does not look complete if this is interrupted.

    Raises:
        OSError: it cannot be removed.
    """
    with reported(f"remove {location}"):
        system = file_system(location)
        if system.exists(f"{location}/{first}"):
            system.rm_file(f"{location}/{first}")
        if not is_url(location):
            shutil.rmtree(location)
        elif has_magic(location):  # `rm` would remove all folders that match it
            for file in system.find(location):
                system.rm_file(file)
        else:
            system.rm(location, recursive=True)


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Raise errors of a file system as OSError with its location: each system has classes of its own.

    Args:
        what: what the block does, for the message.
    """
    try:
        yield
    except Exception as error:
        raise OSError(f"could not {what}: {type(error).__name__}: {error}") from error
