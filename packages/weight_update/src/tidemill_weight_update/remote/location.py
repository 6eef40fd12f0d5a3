"""Where a process runs, to decide whether another process can map its memory."""

import os
from pathlib import Path


def here() -> str:
    """Return an ID of the machine since its last boot, and of this process's PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def can_map(location: str, pid: int) -> bool:
    """Return whether this process can map memory of process `pid`, which runs at `location`."""
    return location == here() and os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK)
