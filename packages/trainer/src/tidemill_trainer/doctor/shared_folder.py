"""Whether processes reach the same folder: a file that one writes, all others read."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tidemill_engines.location import file_system, is_url, read_text, reported, split, write_text

from tidemill_trainer.doctor.finding import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFile:
    """A file in a folder.

    Attributes:
        location: path or URL of the file.
        content: what was written to it.
    """

    location: str
    content: str

    def check(self) -> None:
        """Read the file, and write another one.

        Raises:
            OSError: it cannot be read, has another content, or another one cannot be written.
        """
        folder, _ = split(self.location)
        try:
            content = read_text(self.location)
        except OSError as error:
            raise OSError(f"a file that the driver wrote to {folder} cannot be read: {error}") from error
        if content != self.content:
            raise OSError(f"a file that the driver wrote to {folder} has another content here")
        own = f"{self.location}-{uuid.uuid4().hex}"
        write_text(own, "")
        with reported(f"remove {own}"):
            file_system(own).rm_file(own)


@contextmanager
def shared_file(folder: str) -> Iterator[SharedFile]:
    """Write a file to a folder or URL, and remove it after the block, with the folders that did not exist before.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(folder)
    created = [] if is_url(folder) else [parent for parent in (path, *path.parents) if not parent.exists()]
    file = SharedFile(location=f"{folder}/.tidemill-doctor-{uuid.uuid4().hex}", content=uuid.uuid4().hex)
    write_text(file.location, file.content)
    try:
        yield file
    finally:
        with reported(f"remove {file.location}"):
            file_system(folder).rm_file(file.location)
        with suppress(OSError):  # another run uses the folder by now
            for parent in created:
                parent.rmdir()


def not_shared(key: str, node: str, error: str) -> Finding:
    """Return the finding that a node does not reach the folder of a configuration key."""
    return Finding(
        node=node,
        cause=f"config key {key}: {error}",
        remedy="set it to a folder in which files can be written, of a file system that all nodes share"
        + (
            ", or to a URL that all nodes reach, and install its file system" if key == "trainer.checkpoint_dir" else ""
        ),
    )
