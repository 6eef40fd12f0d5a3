"""The device of a rank."""

import os

import torch


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
