"""Decides whether SGLang runs on this platform. SGLang calls `activate` in each of its processes, early."""

import os

ENV_NAME = "TIDEMILL_SGLANG_CPU"
PLATFORM = "tidemill_sglang_cpu.platform:CpuPlatform"


def activate() -> str | None:
    """SGLang's entry point: the dotted name of the platform class, or None to leave SGLang as it is.

    The environment variable TIDEMILL_SGLANG_CPU decides: "1" activates, "0" does not, and unset activates where
    neither CUDA, ROCm nor XPU is usable and SGLang's own CPU mode (SGLANG_USE_CPU_ENGINE=1) was not asked for.
    Any other value activates a platform that refuses to start: SGLang logs and then ignores what is raised here.
    """
    choice = os.environ.get(ENV_NAME)
    if choice == "0":
        return None
    if choice is not None:
        return PLATFORM
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or accelerator_is_usable():
        return None
    return PLATFORM


def check_environment() -> None:
    """Raises ValueError for a TIDEMILL_SGLANG_CPU that means nothing, RuntimeError where "1" meets a usable GPU."""
    choice = os.environ.get(ENV_NAME)
    if choice not in (None, "0", "1"):
        raise ValueError(
            f'{ENV_NAME} must be "1" (run SGLang on the CPU), "0" (never) or unset (where no GPU is usable), '
            f"got {choice!r}"
        )
    if choice == "1" and accelerator_is_usable():
        raise RuntimeError(
            f"{ENV_NAME}=1 asks for the CPU, but a GPU is visible and SGLang would mix both: "
            'hide it with CUDA_VISIBLE_DEVICES="" (or ZE_AFFINITY_MASK for XPU) as well'
        )


def accelerator_is_usable() -> bool:
    """Whether torch can use a CUDA, ROCm or XPU device in this process."""
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()
