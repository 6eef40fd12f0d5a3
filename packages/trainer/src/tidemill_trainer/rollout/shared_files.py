"""SGLang's files in /dev/shm, which it leaves there when its processes are killed, as they are at every shutdown."""

import os
from pathlib import Path

import psutil

_PREFIX = "/dev/shm/sgl"  # sglang_loads_*.shm (load metrics), sgl_shm_mq_* (messages between tensor-parallel ranks)


def unlink_mapped_files() -> list[Path]:
    """Removes the names of SGLang's shared-memory files that this process or one of its descendants has mapped.

    Call it once the engine serves: every process has its mapping by then and keeps it, and the memory is freed with the
    last of them, however they end.

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
