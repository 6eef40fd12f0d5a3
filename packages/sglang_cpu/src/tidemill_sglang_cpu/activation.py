"""Entry point that decides whether SGLang uses this platform. SGLang calls it early in each of its processes."""

import os

ENV_NAME = "TIDEMILL_SGLANG_CPU"
PLATFORM = "tidemill_sglang_cpu.platform:CpuPlatform"


def activate() -> str | None:
    """Return the dotted name of the platform class, or None to leave SGLang unchanged.

    The environment variable TIDEMILL_SGLANG_CPU decides: "1" activates the platform, "0" does not. If it is unset, the
    platform is activated unless CUDA, ROCm or XPU is usable or SGLang's own CPU mode (SGLANG_USE_CPU_ENGINE=1) is set.
    Any other value activates the platform, which then refuses to start: SGLang only logs errors raised here.
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
    """Raise ValueError for an unknown value of TIDEMILL_SGLANG_CPU, RuntimeError for "1" with a usable GPU."""
    choice = os.environ.get(ENV_NAME)
    if choice not in (None, "0", "1"):
        raise ValueError(
            f'{ENV_NAME} must be "1" (run SGLang on the CPU), "0" (never) or unset (CPU if no GPU is usable), '
            f"got {choice!r}"
        )
    if choice == "1" and accelerator_is_usable():
        raise RuntimeError(
            f"{ENV_NAME}=1 requires that no GPU is visible, because SGLang would mix both: "
            'hide GPUs with CUDA_VISIBLE_DEVICES="" (ZE_AFFINITY_MASK for XPU)'
        )


def accelerator_is_usable() -> bool:
    """Whether torch can use a CUDA, ROCm or XPU device in this process."""
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()
