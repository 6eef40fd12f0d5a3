"""All-reduces between two nodes or GPUs: who measures with whom, and what the measurements mean. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tidemill_trainer.doctor.finding import Finding

_SLOW = 3.0
_IF_BROKEN = {
    "nodes": "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that connects the nodes before Ray is "
    "started on each, and permit TCP between them at all ports from 1024",
    "GPUs": "stop what uses the memory of these GPUs; else repeat it with NCCL_DEBUG=INFO, and with "
    "NCCL_P2P_DISABLE=1, which shows whether direct access between the GPUs fails",
}
_IF_SLOW = {
    "nodes": "check cables, interface and load of these nodes",
    "GPUs": "see `nvidia-smi topo -m` for how they are connected, and `nvidia-smi nvlink --status`",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """An all-reduce of two nodes, or of two GPUs of a node.

    Attributes:
        backend: "nccl" or "gloo".
        latency_s: duration of an all-reduce of 4 bytes, in seconds.
        bytes_per_s: bytes of a large tensor, divided by the duration of its all-reduce.
        error: why it failed; empty if it did not.
    """

    backend: str = ""
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        return (
            f"{self.backend} all-reduce {1000 * self.latency_s:.2f} ms for 4 bytes, {self.bytes_per_s / 1e9:.2f} GB/s "
            "for 64 MiB"
        )


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return all pairs in rounds of a round-robin tournament, in which a node or GPU has one partner at most."""
    ring: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def check_links(links: Mapping[str, Link], ends: str = "nodes") -> Iterator[Finding]:
    """Check that all links work, and that none is much slower than most of them.

    Args:
        links: link by the names of its nodes or GPUs.
        ends: what the links connect, "nodes" or "GPUs".
    """
    working = [link.bytes_per_s for link in links.values() if not link.error]
    for names, link in links.items():
        if link.error:
            yield Finding(
                node=names,
                cause=f"an all-reduce failed: {link.error}",
                remedy=_IF_BROKEN[ends],
            )
        elif link.bytes_per_s * _SLOW < median(working):
            yield Finding(
                node=names,
                cause=f"{link.bytes_per_s / 1e9:.2f} GB/s in an all-reduce, and {median(working) / 1e9:.2f} GB/s "
                f"between most {ends}",
                remedy=_IF_SLOW[ends],
                is_error=False,
            )
