"""The trainer's memory as an engine rank maps it: opened once and kept while the trainer announces it."""

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidemill_weight_update.memory.handle import DeviceMemory, HostMemory

if TYPE_CHECKING:
    from tidemill_weight_update.memory.cuda_memory import ImportedMemory

_Key = tuple[str, int, int] | tuple[int, int]


class MappedMemories:
    """Open mappings, keyed by what they map.

    Args:
        device: device of the engine rank. Memory of other GPUs of this machine is mapped into it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[tuple[str, int, int], Tensor] = {}
        self._gpu: dict[tuple[int, int], ImportedMemory] = {}
        self._used: set[_Key | int] = set()  # keys, and ids of the tuples in `_lists`
        self._used_before: set[_Key | int] = set()
        self._lists: dict[int, tuple[tuple[DeviceMemory, ...], list[int], set[tuple[int, int]]]] = {}

    def tensor(self, memory: HostMemory) -> Tensor:
        """Return a read-only view, uint8 [num_bytes], of the trainer's host memory.

        Raises:
            RuntimeError: the memory cannot be opened, or its path leads to another file now.
        """
        key = (memory.path, memory.inode, memory.num_bytes)
        try:
            found = os.stat(memory.path)
        except OSError as error:
            raise RuntimeError(
                f"cannot open the trainer's memory {memory.path} ({error.strerror}); is the trainer still running?"
            ) from error
        if (found.st_ino, found.st_size) != (memory.inode, memory.num_bytes):
            raise RuntimeError(
                f"the trainer's memory {memory.path} is closed (its file descriptor was reused): the WeightUpdater was "
                f"closed, or trainer and engine are in different PID namespaces; call update() again, or use "
                f"link=GroupLink(...)"
            )
        if key not in self._host:
            # A private mapping neither writes to nor grows the file; unwritten pages are shared with the trainer.
            self._host[key] = torch.from_file(memory.path, False, memory.num_bytes, dtype=torch.uint8)
        self._used.add(key)
        return self._host[key]

    def address(self, memory: DeviceMemory) -> int:
        """Return the address of the allocation in this process.

        Raises:
            RuntimeError: CUDA cannot open it.
        """
        key = (memory.pid, memory.buffer_id)
        if memory.pid == os.getpid():
            return memory.address
        if key not in self._gpu:
            from tidemill_weight_update.memory.cuda_memory import ImportedMemory

            self._gpu[key] = ImportedMemory(memory, self._device)
        self._used.add(key)
        return self._gpu[key].address

    def addresses(self, memories: tuple[DeviceMemory, ...]) -> list[int]:
        """Return `address` of each. The result is cached with the tuple, because a model may use thousands of
        allocations.
        """
        if id(memories) not in self._lists:
            keys = {(memory.pid, memory.buffer_id) for memory in memories}
            self._lists[id(memories)] = memories, [self.address(memory) for memory in memories], keys
        self._used.add(id(memories))
        return self._lists[id(memories)][1]

    def close_unused(self) -> bool:
        """Close mappings that were not requested since the last call: their owner no longer uses them.

        Returns:
            Whether any mapping was closed. Host memory stays mapped as long as a tensor refers to it.
        """
        used, self._used = self._used, set()
        if used == self._used_before:
            return False
        self._used_before = used
        keys = used.union(*(self._lists[item][2] for item in used if isinstance(item, int)))
        self._lists = {number: known for number, known in self._lists.items() if number in used}
        num_open = len(self._host) + len(self._gpu)
        for key in [key for key in self._host if key not in keys]:
            del self._host[key]
        for key in [key for key in self._gpu if key not in keys]:
            self._gpu.pop(key).close()
        return len(self._host) + len(self._gpu) < num_open
