"""What an engine rank keeps of memory that others announce."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tidemill_weight_update.memory.arena import HostArena
from tidemill_weight_update.memory.handle import DeviceMemory
from tidemill_weight_update.memory.mapped import MappedMemories


def test_addresses_of_lines_that_do_not_come_again_are_forgotten():
    """All lines lie in one allocation, which stays in use."""
    mapped = MappedMemories(torch.device("cpu"))
    allocation = DeviceMemory(pid=os.getpid(), buffer_id=7, handle=b"", address=4096, num_bytes=8, device_uuid="own")
    always = (allocation,)
    kept = []
    for count in range(2, 50):
        line = (allocation,) * count
        assert mapped.addresses(always) == [4096]
        assert mapped.addresses(line) == [4096] * count
        assert mapped.addresses(line) is mapped.addresses(line)
        mapped.close_unused()
        kept.append(len(mapped._lists))
    assert set(kept) == {2}


READER = """
import sys
import torch
from tidemill_weight_update.memory.handle import HostMemory
from tidemill_weight_update.memory.mapped import MappedMemories
path, num_bytes, inode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mapped = MappedMemories(torch.device("cpu"))
for line in sys.stdin:
    tensor = mapped.tensor(HostMemory(path=path, num_bytes=num_bytes, inode=inode))
    print(tensor.sum(dtype=torch.int64).item(), flush=True)
"""


def test_what_the_trainer_writes_is_seen_in_memory_that_was_read_before():
    """In pages that were empty when they were mapped, that were read when they were empty, and that were full."""
    size = 40 * 4096 + 100
    arena = HostArena(size)
    memory = arena.publish()
    mapped = MappedMemories(torch.device("cpu"))
    command = [sys.executable, "-c", READER, memory.path, str(memory.num_bytes), str(memory.inode)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        generator = torch.Generator().manual_seed(0)
        for written in (0, 20 * 4096, size, size, 5):
            values = torch.randint(256, (written,), generator=generator, dtype=torch.uint8)
            arena.data[:written] = values
            assert mapped.tensor(memory).equal(arena.data)
            other.stdin.write("\n")
            other.stdin.flush()
            assert int(other.stdout.readline()) == arena.data.sum(dtype=torch.int64).item()
        other.stdin.close()
    arena.close()


@pytest.mark.parametrize("num_bytes", [10, 1000, 5000])
def test_a_file_that_has_come_into_the_place_of_memory_is_neither_read_nor_written(tmp_path, num_bytes):
    """A trainer closes its updater and goes on to write, to its log under the same number, say."""
    arena = HostArena(1000)
    memory = arena.publish()
    arena.close()
    path = tmp_path / "log"
    path.write_bytes(b"x" * num_bytes)
    number = os.open(path, os.O_RDWR)  # the lowest that is free, which the arena's was
    try:
        assert memory.path == f"/proc/{os.getpid()}/fd/{number}"
        mapped = MappedMemories(torch.device("cpu"))
        with pytest.raises(RuntimeError, match=r"memory /proc/\d+/fd/\d+ is gone, another file of it has that number"):
            mapped.tensor(memory)
        # Were it taken for the same file, it would be mapped, but not changed.
        mapped.tensor(replace(memory, inode=os.fstat(number).st_ino, num_bytes=num_bytes)).fill_(0)
    finally:
        os.close(number)
    assert path.read_bytes() == b"x" * num_bytes


def test_memory_that_is_gone_is_an_error():
    arena = HostArena(1000)
    memory = arena.publish()
    arena.close()
    with pytest.raises(RuntimeError, match=r"cannot open the trainer's memory /proc/\d+/fd/\d+: No such file"):
        MappedMemories(torch.device("cpu")).tensor(memory)
