"""Where checkpoints are: folders, or fsspec URLs such as s3://bucket/folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec

TEMPORARY = "tidemill-checkpoint-"
"""Start of the names of temporary folders with files of URLs."""


def is_url(location: str | Path) -> bool:
    return "://" in str(location)


def absolute(location: str | Path) -> str:
    """Return a location that means the same in all processes: an absolute path, or a URL without a final slash."""
    return str(location).rstrip("/") if is_url(location) else os.path.abspath(location)


def split(location: str) -> tuple[str, str]:
    """Return the parent of a location and its name in it."""
    parent, _, name = location.rpartition("/")
    return parent, name


def file_system(location: str) -> fsspec.AbstractFileSystem:
    """Return the file system of a location. It caches no listings, because other processes write there, too.

    Raises:
        ValueError: the protocol of a URL is unknown.
        ImportError: the package of its protocol is not installed.
    """
    system, _ = fsspec.url_to_fs(location, use_listings_cache=False)
    return system


def sizes(location: str) -> dict[str, int | None]:
    """Return the sizes of the files in a folder by name; those of folders are undefined. Empty if it does not exist."""
    try:
        entries = file_system(location).ls(location, detail=True)
    except FileNotFoundError:
        return {}
    return {entry["name"].rstrip("/").split("/")[-1]: entry["size"] for entry in entries}


@contextmanager
def written_to(location: str) -> Iterator[Path]:
    """Yield a folder whose files are in `location` after the block.

    It is the folder itself, which is created, or for a URL a temporary one, which is uploaded.

    Raises:
        OSError: the upload failed.
    """
    if not is_url(location):
        Path(location).mkdir(parents=True, exist_ok=True)
        yield Path(location)
        return
    with TemporaryDirectory(prefix=TEMPORARY) as name:
        yield Path(name)
        files = [str(path) for path in Path(name).rglob("*") if path.is_file()]
        with reported(f"write to {location}"):
            file_system(location).put(files, [location + file.removeprefix(name) for file in files])


def remove(location: str, *, first: str) -> None:
    """Remove a folder, beginning with the file `first`, so that it does not look complete if this is interrupted.

    Raises:
        OSError: it cannot be removed.
    """
    with reported(f"remove {location}"):
        system = file_system(location)
        if system.exists(f"{location}/{first}"):
            system.rm_file(f"{location}/{first}")
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
