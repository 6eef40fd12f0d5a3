"""The arena of the stock path in GPU memory, shared by CUDA IPC."""

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from tidemill_weight_update.memory.handle import CudaMemory

_DEVICE_ARG = 6  # index of the device in rebuild_cuda_tensor's arguments, as in SGLang's monkey_patch_torch_reductions


class CudaArena:
    """GPU memory that is exported once: the same handle serves every bucket, rank and engine.

    torch counts the receivers of a shared storage to know when the sender may free it. Here the sender keeps the
    storage alive itself and ignores that count, so the handle may be opened any number of times. (Exporting it again
    for each bucket would wrap the storage in one more owner each time.)
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.data: Tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        _, args = reductions.reduce_tensor(self.data)
        uuid = str(torch.cuda.get_device_properties(self.data.device).uuid)
        args = (*args[:_DEVICE_ARG], uuid, *args[_DEVICE_ARG + 1 :])
        self._memory = CudaMemory(device_uuid=uuid, num_bytes=num_bytes, rebuild_args=args)

    def publish(self) -> CudaMemory:
        torch.cuda.current_stream(self.data.device).synchronize()
        return self._memory

    def close(self) -> None:
        del self.data
