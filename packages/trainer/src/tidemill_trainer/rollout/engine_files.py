"""The files that SGLang makes outside of the run's folder and leaves there, since it ends its processes by SIGKILL."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "/dev/shm/sgl"  # sglang_loads_*.shm (load metrics), sgl_shm_mq_* (messages between tensor-parallel ranks)


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """The files of a run's engines on this machine: sockets in `folder`, and shared memory with its name.

    The driver makes and removes them, for an engine's own process may not live to do it: SGLang kills that, too, when
    the engine fails.
    """

    folder: Path

    @classmethod
    def create(cls) -> "EngineFiles":
        """Makes a new folder among the temporary files, since the path of a socket may have 107 characters at most."""
        return cls(Path(tempfile.mkdtemp(prefix="tidemill-")))

    def claim(self, rank: int) -> str:
        """Makes the files of the engine that this process starts next belong to this run, through SGLang's hooks.

        Args:
            rank: of the engine among those of the run.

        Returns:
            The `port_args.instance_id` that the engine has then, from which SGLang names its shared memory.
        """
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        instance_id = f"{self.folder.name}-{rank}"

        def init_new(original: Any, *args: Any, **kwargs: Any) -> Any:
            self.folder.mkdir(exist_ok=True)  # the driver made it, but on another machine perhaps
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

    def remove(self) -> None:
        """Removes what there is of them, once the engines' processes are gone."""
        for path in _SHARED_MEMORY.glob(f"sglang_loads_{self.folder.name}-*"):
            path.unlink()
        shutil.rmtree(self.folder)


def unlink_mapped_files() -> list[Path]:
    """Removes the names of SGLang's shared-memory files that this process or one of its descendants has mapped.

    Call it once the engine serves: every process has its mapping by then and keeps it, and the memory is freed with the
    last of them, even where no driver lives to remove anything.

    Returns:
        The files whose names were removed.
    """
    me = psutil.Process(os.getpid())
    mapped: set[Path] = set()
    for process in [me, *me.children(recursive=True)]:
        try:
            mapped.update(Path(item.path) for item in process.memory_maps() if item.path.startswith(_PREFIX))
        except psutil.NoSuchProcess:  # a helper that ended while we looked
            continue
    removed = sorted(path for path in mapped if path.exists())
    for path in removed:
        path.unlink()
    return removed
