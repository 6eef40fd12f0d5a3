"""Where a process runs: whether another one can see it and map its memory."""

import os
from pathlib import Path


def here() -> str:
    """Names the machine, since it was started, and the PID namespace of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def can_map(location: str, pid: int) -> bool:
    """Whether this process can map memory of process `pid`, which runs at `location`."""
    return location == here() and os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK)
