"""Memory of trainer ranks as mapped by an engine rank."""

import os
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from tidemill_weight_update.cuda_memory import DeviceMemory
from tidemill_weight_update.memory import HostArena, MappedMemories


def test_memory_that_is_no_longer_declared_is_unmapped():
    first, second = HostArena(1000), HostArena(2000)
    mapped = MappedMemories(torch.device("cpu"))
    one, two = first.publish(), second.publish()
    view, other = mapped.block(one), weakref.ref(mapped.block(two))
    mapped.keep([one])
    assert mapped.block(one) is view
    assert other() is None
    first.close()
    second.close()


def test_gpu_memory_is_refused_on_a_cpu():
    memory = DeviceMemory(pid=os.getpid(), buffer_id=7, handle="", address=4096, num_bytes=8, device_uuid="own")
    with pytest.raises(RuntimeError, match="an engine on a CPU cannot read GPU memory; pass device='cpu'"):
        MappedMemories(torch.device("cpu")).block(memory)


READER = """
import sys
import torch
from tidemill_weight_update.memory import HostMemory
from tidemill_weight_update.memory import MappedMemories
path, num_bytes, inode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mapped = MappedMemories(torch.device("cpu"))
for line in sys.stdin:
    memory = HostMemory(path=path, num_bytes=num_bytes, inode=inode)
    tensor = mapped.block(memory)
    print(tensor.sum(dtype=torch.int64).item(), flush=True)
"""


def test_mapped_memory_sees_later_trainer_writes():
    """In pages that were empty when mapped, pages that were read while empty, and pages that had content."""
    size = 40 * 4096 + 100
    arena = HostArena(size)
    memory = arena.publish()
    mapped = MappedMemories(torch.device("cpu"))
    mapped.block(memory)
    command = [sys.executable, "-c", READER, memory.path, str(memory.num_bytes), str(memory.inode)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        generator = torch.Generator().manual_seed(0)
        for written in (0, 20 * 4096, size, size, 5):
            values = torch.randint(256, (written,), generator=generator, dtype=torch.uint8)
            arena.data[:written] = values
            assert mapped.block(memory).equal(arena.data)
            other.stdin.write("\n")
            other.stdin.flush()
            assert int(other.stdout.readline()) == arena.data.sum(dtype=torch.int64).item()
        other.stdin.close()
    arena.close()


@pytest.mark.parametrize("num_bytes", [10, 1000, 5000])
def test_reused_file_descriptor_is_neither_read_nor_written(tmp_path, num_bytes):
    """As when a trainer closes its updater and then opens a log file, which gets the same descriptor."""
    arena = HostArena(1000)
    memory = arena.publish()
    arena.close()
    path = tmp_path / "log"
    path.write_bytes(b"x" * num_bytes)
    number = os.open(path, os.O_RDWR)  # the lowest free number, which was the arena's
    try:
        assert memory.path == f"/proc/{os.getpid()}/fd/{number}"
        mapped = MappedMemories(torch.device("cpu"))
        with pytest.raises(RuntimeError, match=r"memory /proc/\d+/fd/\d+ is closed \(its file descriptor was reused\)"):
            mapped.block(memory)
        # Even if it was mistaken for the same file, the mapping is private: the file does not change.
        mistaken = replace(memory, inode=os.fstat(number).st_ino, num_bytes=num_bytes)
        mapped.block(mistaken).fill_(0)
    finally:
        os.close(number)
    assert path.read_bytes() == b"x" * num_bytes


def test_closed_memory_is_an_error():
    arena = HostArena(1000)
    memory = arena.publish()
    arena.close()
    with pytest.raises(RuntimeError, match=r"cannot open the trainer's memory /proc/\d+/fd/\d+ \(No such file"):
        MappedMemories(torch.device("cpu")).block(memory)
