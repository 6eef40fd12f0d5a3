"""Wires over gloo between two threads of this process."""

import threading

from remote_engines import resources, settled, steady
from tidemill_weight_update.remote.wire import ENGINE, TRAINER, GlooWire
from torch.distributed import HashStore


def connected(name: str) -> list[GlooWire]:
    store = HashStore()
    wires: dict[int, GlooWire] = {}

    def connect(rank: int) -> None:
        wires[rank] = GlooWire(store, name, rank, "127.0.0.1", timeout_s=30)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (TRAINER, ENGINE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [wires[TRAINER], wires[ENGINE]]


def test_close_releases_files_sockets_and_threads_of_a_wire_that_is_referenced():
    for wire in connected("first"):
        wire.close()
    before = steady(resources)
    wires = connected("second")
    assert resources() != before
    for wire in wires:
        wire.close()
    assert settled(resources, before.__eq__) == before
