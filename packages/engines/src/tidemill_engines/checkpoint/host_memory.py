"""Memory of the hosts for copies of what is saved."""

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tidemill_engines.distributed.agreement import all_gather

_USED_SHARE = 0.8  # of the available memory; the rest is left to what else grows while a copy exists
_CGROUP = Path("/sys/fs/cgroup")
_NUM_THREADS = 8
_GATHERED_BYTES = 10**9


def copies_fit(num_bytes: int, group: dist.ProcessGroup) -> bool:
    """Return on all ranks whether each host has memory for the copies of its ranks. Collective.

    Args:
        num_bytes: size of this rank's copy.
    """
    ranks = all_gather((socket.gethostname(), num_bytes, available_bytes()), group)
    needed: Counter[str] = Counter()
    for host, size, _ in ranks:
        needed[host] += size
    return all(needed[host] <= _USED_SHARE * available for host, _, available in ranks)


def available_bytes(memory_info: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the memory that processes can still allocate here, within the limit of a container, if it has one."""
    lines = dict(line.split(":", 1) for line in memory_info.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) << 10
    limit = cgroup / "memory.max"  # cgroup v2; "max" where there is no limit
    if limit.is_file() and (maximum := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"])
        available = min(available, int(maximum) - used)
    return available


def host_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the CPU.

    Several threads write zeros first: the kernel assigns new memory page by page when it is first written, which takes
    one thread 5 s for 7 GB, where the copy from a GPU takes 0.6 s.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor, device="cpu").copy_(tensor)

    with ThreadPoolExecutor(_NUM_THREADS) as executor:
        return list(executor.map(copy, (tensor.detach() for tensor in tensors)))


def gathered(weights: Iterator[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> list[tuple[str, torch.Tensor]]:
    """All-gather weights into copies on the CPU of the first rank; others have empty tensors. Collective.

    The first rank holds full tensors of about 1 GB on its device, to copy them together.
    """
    is_writer = dist.get_rank(group) == 0
    held: list[tuple[str, torch.Tensor]] = []
    batch: list[tuple[str, torch.Tensor]] = []

    def copy() -> None:
        held.extend(zip([name for name, _ in batch], host_copies([weight for _, weight in batch]), strict=True))
        batch.clear()

    for name, weight in weights:
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        batch.append((name, full if is_writer else torch.empty(0)))
        if sum(tensor.nbytes for _, tensor in batch) >= _GATHERED_BYTES:
            copy()
    copy()
    return held
