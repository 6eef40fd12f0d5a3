"""The trainer's memory as an engine rank maps it: opened once and kept while the trainer declares it."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidemill_weight_update.memory.handle import DeviceMemory, HostMemory, Memory

if TYPE_CHECKING:
    from tidemill_weight_update.memory.cuda_memory import ImportedMemory

_Key = tuple[str | int, int]


class MappedMemories:
    """Open mappings of the trainer's memory.

    Args:
        device: device of the engine rank. Memory of other GPUs of this machine is mapped into it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[_Key, Tensor | ImportedMemory] = {}

    def open(self, memories: Iterable[Memory]) -> None:
        """Map these memories and unmap all others. Host memory stays mapped as long as a tensor refers to it.

        Raises:
            RuntimeError: a memory cannot be opened, or its path leads to another file now.
        """
        wanted = {_key(memory): memory for memory in memories}
        for key in self._open.keys() - wanted.keys():
            mapping = self._open.pop(key)
            if not isinstance(mapping, Tensor):
                mapping.close()
        for key, memory in wanted.items():
            if key not in self._open:
                self._open[key] = self._map(memory)

    def tensor(self, memory: HostMemory) -> Tensor:
        """Return a read-only view, uint8 [num_bytes], of open host memory."""
        mapping = self._open[_key(memory)]
        assert isinstance(mapping, Tensor)
        return mapping

    def address(self, memory: DeviceMemory) -> int:
        """Return the address of open GPU memory in this process."""
        mapping = self._open[_key(memory)]
        assert not isinstance(mapping, Tensor)
        return mapping.address

    def _map(self, memory: Memory) -> "Tensor | ImportedMemory":
        if isinstance(memory, HostMemory):
            return _map_file(memory)
        if self._device.type == "cpu":
            raise RuntimeError("an engine on a CPU cannot read GPU memory; pass device='cpu' to WeightUpdater")
        from tidemill_weight_update.memory.cuda_memory import ImportedMemory

        return ImportedMemory(memory, self._device)


def _key(memory: Memory) -> _Key:
    return (memory.path, memory.inode) if isinstance(memory, HostMemory) else (memory.pid, memory.buffer_id)


def _map_file(memory: HostMemory) -> Tensor:
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
    # A private mapping neither writes to nor grows the file; unwritten pages are shared with the trainer.
    return torch.from_file(memory.path, False, memory.num_bytes, dtype=torch.uint8)
