"""A process on a node that answers the questions of a survey."""

import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tidemill_trainer.doctor.facts import NodeFacts, interface_of, read_facts
from tidemill_trainer.doctor.leftovers import clean, describe
from tidemill_trainer.doctor.links import Link
from tidemill_trainer.doctor.shared_folder import SharedFile

_CONNECT_S = 5.0
_READ_S = 3.0


class Probe:
    """A Ray actor on one node.

    Args:
        address: address of the node in the cluster.
        run_dir: parent folder of the runs.
    """

    def __init__(self, address: str, run_dir: str) -> None:
        self._address = address
        self._run_dir = Path(run_dir)
        self._listener: socket.socket | None = None

    def facts(self, model: str | None, *, has_leftovers: bool) -> NodeFacts:
        """Return the facts of the node."""
        return read_facts(self._address, model, describe(self._run_dir) if has_leftovers else ())

    def clean(self) -> list[str]:
        """Remove what dead runs left on the node, and return it in words."""
        return clean(self._run_dir)

    def clock(self) -> float:
        """Return the time of the node."""
        return time.time()

    def listen(self) -> int:
        """Listen at the address of the node, and return the port."""
        self._listener = socket.create_server((self._address, 0))
        return self._listener.getsockname()[1]

    def connect(self, others: Sequence[tuple[str, int]]) -> list[str]:
        """Connect to ports at the same time.

        Returns:
            For each why it failed; empty if it did not.
        """
        with ThreadPoolExecutor(max(1, min(64, len(others)))) as pool:
            return list(pool.map(_connect, others))

    def prepare_links(self) -> None:
        """Import torch, which takes seconds. Gloo and NCCL use the interface of the node's address."""
        interface = interface_of(self._address)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        if not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
            del os.environ["CUDA_VISIBLE_DEVICES"]  # Ray hides the GPUs of processes that reserve none
        import torch  # noqa: F401

    def measure_link(self, rank: int, address: str, port: int) -> Link:
        """Measure all-reduces with another node; rank 0 is the one that listens (see `measure_link`)."""
        from tidemill_trainer.doctor.collective import measure_link

        listener, self._listener = (self._listener, None) if rank == 0 else (None, self._listener)
        return measure_link(rank, address, port, listener)

    def measure_gpus(self) -> dict[str, Link]:
        """Measure all-reduces between all pairs of GPUs of the node."""
        self.prepare_links()
        from tidemill_trainer.doctor.collective import measure_gpus

        return measure_gpus()

    def check(self, file: SharedFile) -> str:
        """Return why a file that another node has written cannot be read here; empty if it can.

        A network file system may show it with a delay.
        """
        deadline = time.monotonic() + _READ_S
        while True:
            try:
                file.check()
                return ""
            except OSError as error:
                if time.monotonic() > deadline:
                    return str(error)
            time.sleep(0.2)


def _connect(other: tuple[str, int]) -> str:
    try:
        socket.create_connection(other, timeout=_CONNECT_S).close()
    except OSError as error:
        return str(error)
    return ""
