"""The files that SGLang creates outside the run's folder. SGLang kills its own processes, so it leaves them behind."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

_SHARED_MEMORY = Path("/dev/shm")
_MAPPED_PREFIX = (
    "/dev/shm/sgl"  # sglang_loads_*.shm (load metrics), sgl_shm_mq_* (messages between tensor-parallel ranks)
)
_FOLDER_PREFIX = "tidemill-run-"


class EngineFiles:
    """The files of one run's engines on a machine: sockets in `folder`, and shared memory named after it.

    The driver creates and removes them, because SGLang also kills the process that started it when an engine fails. On
    other nodes, the first process of the run that calls `join` creates the folder, with the same path.

    Every process of the run that uses the folder holds a shared `flock` on it, which the kernel releases when the
    process dies. A folder without a lock therefore belongs to a dead run, and the next start removes it.

    Pickling an instance carries the path but not the lock: a process that receives one calls `join` or `claim`.

    Args:
        folder: the folder of the sockets.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    def __reduce__(self) -> tuple[type["EngineFiles"], tuple[Path]]:
        return EngineFiles, (self.folder,)

    @classmethod
    def create(cls) -> "EngineFiles":
        """Remove the files of dead runs, then create and hold a new temporary folder.

        The folder is a temporary one because the path of a socket has at most 107 characters.
        """
        remove_leftovers()
        while True:
            files = cls(Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX)))
            if files.hold():
                return files

    def hold(self) -> bool:
        """Mark the folder as in use until `remove` or the end of this process.

        Returns:
            Whether this process holds the folder now. False: there is no such folder, or another run's start removed it
            before it was locked.
        """
        with contextlib.suppress(FileNotFoundError):
            lock = _open(self.folder)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if self.folder.exists():
                self._lock = lock
                return True
            os.close(lock)
        return False

    def join(self) -> None:
        """Hold the folder in a worker; on a node where it does not exist, create it as `create` does."""
        while not self.hold():
            remove_leftovers(self.folder.parent)
            self.folder.mkdir(exist_ok=True)

    def claim(self, rank: int) -> str:
        """Assign the files of the engine that this process starts next to this run, through SGLang's hooks.

        Args:
            rank: rank of the engine among those of the run.

        Returns:
            The `port_args.instance_id` of that engine, from which SGLang names its shared memory.
        """
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        self.join()
        instance_id = f"{self.folder.name}-{rank}"

        def init_new(original: Any, *args: Any, **kwargs: Any) -> Any:
            usual, tempfile.tempdir = tempfile.tempdir, str(self.folder)
            try:
                port_args = original(*args, **kwargs)
            finally:
                tempfile.tempdir = usual
            port_args.instance_id = instance_id
            return port_args

        HookRegistry.register("sglang.srt.server_args.PortArgs.init_new", init_new, HookType.AROUND)
        HookRegistry.apply_hooks()
        return instance_id

    def store(self, rank: int) -> str:
        """Return where the processes of an engine find each other, as an init method of torch.distributed.

        It is a file, because the TCP store that SGLang would start listens on all addresses.
        """
        file = self.folder / f"store-{rank}"
        file.unlink(missing_ok=True)  # of an engine with this rank that died
        return f"file://{file}"

    def remove(self) -> None:
        """Remove all files of the run. Call it after the engines' processes have ended."""
        _remove(self.folder)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def leftovers() -> list[Path]:
    """Return the folders of engine files of this user's dead runs, such as runs that were ended by `kill -9`."""
    return list(_unused_folders())


def hold_temporary_folder() -> None:
    """Join the run whose temporary folder this process has (see `worker_environment`), if it has one."""
    folder = Path(os.environ.get("TMPDIR", "/"))
    if folder.name.startswith(_FOLDER_PREFIX):
        EngineFiles(folder).join()


def remove_when_unused(folder: Path) -> None:
    """Remove the files of a run, and of dead runs, once the run's processes on this machine have ended; wait 10 s."""
    deadline = time.monotonic() + 10.0
    while folder.exists() and time.monotonic() < deadline:
        remove_leftovers(folder.parent)
        time.sleep(0.1)


def remove_leftovers(parent: Path | None = None) -> list[Path]:
    """Remove the engine files of this user's dead runs.

    Args:
        parent: the folder for temporary files; None: that of this process.

    Returns:
        The folders that were removed.
    """
    removed = []
    for folder in _unused_folders(parent):
        _remove(folder)
        removed.append(folder)
    return removed


def _unused_folders(parent: Path | None = None) -> Iterator[Path]:
    """Yield the folders that no live process holds. While the caller has one, no process can hold it."""
    for folder in (Path(tempfile.gettempdir()) if parent is None else parent).glob(f"{_FOLDER_PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = _open(folder)
        except (FileNotFoundError, NotADirectoryError):  # another start removes it at the same time, or it is no folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        except BlockingIOError:  # a live run holds it
            continue
        finally:
            os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _remove(folder: Path) -> None:
    for path in _SHARED_MEMORY.glob(f"sglang_loads_{folder.name}-*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder)


def unlink_mapped_files() -> list[Path]:
    """Unlink SGLang's shared-memory files that this process or one of its descendants has mapped.

    Call it when the engine serves: every process has its mapping by then and keeps it. The kernel frees the memory with
    the last mapping, even if the driver was killed and removes nothing.

    Returns:
        The files that were unlinked.
    """
    me = psutil.Process(os.getpid())
    mapped: set[Path] = set()
    for process in [me, *me.children(recursive=True)]:
        try:
            mapped.update(Path(item.path) for item in process.memory_maps() if item.path.startswith(_MAPPED_PREFIX))
        except psutil.NoSuchProcess:  # a helper process ended during the loop
            continue
    unlinked = sorted(path for path in mapped if path.exists())
    for path in unlinked:
        path.unlink()
    return unlinked
