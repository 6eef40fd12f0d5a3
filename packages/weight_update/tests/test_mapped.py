"""What an engine rank keeps of memory that others announce."""

import os

import torch
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
