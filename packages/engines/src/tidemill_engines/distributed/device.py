"""The device of a rank."""

import os

import torch


def limit_threads(device: torch.device) -> None:
    """Run CPU operations beside a GPU on one thread, unless OMP_NUM_THREADS sets their number.

    torch uses a thread for each core of the machine by default, even for small operations, and each rank does: with
    four ranks on 64 cores, they wait for each other's threads for most of a training step.
    """
    if device.type == "cuda" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device. On a GPU it goes through pinned memory, since another copy waits for the queue."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def resolve_device(name: str) -> torch.device:
    """Return the device of this process; LOCAL_RANK selects the GPU if several are visible.

    Raises:
        RuntimeError: "cuda" without a usable CUDA device, or LOCAL_RANK has no GPU.
    """
    usable = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not usable):
        return torch.device("cpu")
    if not usable:
        raise RuntimeError("the engine's device is 'cuda' but torch sees no CUDA device; use 'auto' or 'cpu'")
    count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    index = 0 if count == 1 else local_rank  # a launcher may show each process only its own GPU
    if index >= count:
        raise RuntimeError(f"LOCAL_RANK is {local_rank} but torch sees {count} CUDA devices; start fewer processes")
    return torch.device("cuda", index)
