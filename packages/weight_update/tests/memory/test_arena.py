"""Host memory shared with other processes, and what is left of it."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tidemill_weight_update.memory.arena import ArenaRing, HostArena, new_stock_arena

READER = """
import sys, torch
t = torch.from_file(sys.argv[1], False, int(sys.argv[2]), dtype=torch.uint8)
print(t.sum().item())
t.fill_(0)  # private to the reader
"""

SENDER = """
import sys, time, torch
from tidemill_weight_update.memory.arena import HostArena
arena = HostArena(1 << 20)
arena.data.fill_(1)
memory = arena.publish()
print(memory.path, memory.num_bytes, flush=True)
time.sleep(60)
"""


def read_elsewhere(path: str, num_bytes: int) -> int:
    command = [sys.executable, "-c", READER, path, str(num_bytes)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def shm_files() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def test_another_process_reads_what_was_written_and_cannot_write_it():
    arena = HostArena(1000)
    arena.data.fill_(3)
    memory = arena.publish()
    assert read_elsewhere(memory.path, memory.num_bytes) == 3000
    assert arena.data.sum().item() == 3000
    arena.close()
    assert not os.path.exists(memory.path)


def test_nothing_is_left_when_the_sender_is_killed():
    before = shm_files()
    sender = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    try:
        assert sender.stdout is not None
        path, num_bytes = sender.stdout.readline().split()
        mapped = torch.from_file(path, False, int(num_bytes), dtype=torch.uint8)
        assert Path(path).readlink().name.startswith("memfd:tidemill-weights")
        sender.send_signal(signal.SIGKILL)
        sender.wait()
        assert mapped.sum().item() == 1 << 20  # what is mapped stays readable
        assert not os.path.exists(path)
        assert not [name for name in shm_files() - before if "tidemill" in name]
        del mapped
    finally:
        sender.kill()
        sender.wait()
    with open("/proc/self/maps") as maps:
        assert "tidemill-weights" not in maps.read()


def test_closing_gives_everything_back():
    descriptors = len(os.listdir("/proc/self/fd"))
    ring = ArenaRing(1, partial(new_stock_arena, torch.device("cpu")))
    for size in (100, 5000, 100, 0):
        assert ring.next(size).data.numel() >= size
    ring.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with open("/proc/self/maps") as maps:
        assert "tidemill-weights" not in maps.read()


def test_the_memory_grows_once_and_is_kept():
    ring = ArenaRing(1, partial(new_stock_arena, torch.device("cpu")))
    big = ring.next(5000)
    assert ring.next(100) is big
    assert ring.next(6000) is not big
    ring.close()


def test_memory_that_cannot_be_had_is_an_error():
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match=r"needs 1.15e\+09 GB of shared memory, .* GB are available; choose smaller"):
        HostArena(1 << 60)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_device_without_arena_is_refused():
    with pytest.raises(ValueError, match="cpu or cuda memory, got meta"):
        new_stock_arena(torch.device("meta"), 10)
