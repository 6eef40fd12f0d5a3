"""Host memory shared with other processes, and its release."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared_memory import arena_mappings
from tidemill_weight_update.memory import HostArena, new_stock_arena

SENDER = """
import sys, time, torch
from tidemill_weight_update.memory import HostArena
arena = HostArena(1 << 20)
arena.data.fill_(1)
memory = arena.publish()
print(memory.path, memory.num_bytes, flush=True)
time.sleep(60)
"""


def test_no_memory_remains_after_sender_is_killed():
    before = arena_mappings()
    sender = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    try:
        assert sender.stdout is not None
        path, num_bytes = sender.stdout.readline().split()
        mapped = torch.from_file(path, False, int(num_bytes), dtype=torch.uint8)
        assert Path(path).readlink().name.startswith("memfd:tidemill-weights")
        assert "/dev/shm/" not in Path(f"/proc/{sender.pid}/maps").read_text()  # would outlive it
        sender.send_signal(signal.SIGKILL)
        sender.wait()
        assert mapped.sum().item() == 1 << 20  # a mapping stays readable
        assert not os.path.exists(path)
        del mapped
    finally:
        sender.kill()
        sender.wait()
    assert arena_mappings() == before


def test_close_releases_mappings_and_descriptors():
    before = arena_mappings()
    descriptors = len(os.listdir("/proc/self/fd"))
    arena = new_stock_arena(torch.device("cpu"), 5000)
    assert arena.data.numel() == 5000
    arena.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert arena_mappings() == before


def test_arena_larger_than_shared_memory_is_refused():
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        RuntimeError, match=r"needs 1.15e\+09 GB of shared memory, .* GB are available; reduce bucket_bytes"
    ):
        HostArena(1 << 60)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_device_without_arena_is_refused():
    with pytest.raises(ValueError, match="device must be cpu or cuda, got meta"):
        new_stock_arena(torch.device("meta"), 10)
