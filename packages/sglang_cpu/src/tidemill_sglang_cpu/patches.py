"""All monkeypatches of SGLang; applied on activation only. Paths are those of SGLang 0.5.17."""

from typing import NoReturn


def apply_patches() -> None:
    """Replace four names for which SGLang has no hook.

    1. `srt/batch_invariant_ops.enable_batch_invariant_mode`, which ModelRunner calls for
       enable_deterministic_inference. SGLang's function raises "No supported accelerator (CUDA/XPU) available" on every
       out-of-tree platform (get_dispatch_device_backend in srt/utils/common.py) and has Triton kernels only.
       Removable when SRTPlatform has a method for it.
    2. `srt/distributed/device_communicators/pynccl.NCCLLibrary`, which loads the NCCL of torch's default
       Linux wheel. If that succeeds, PyNcclCommunicator requires a CUDA device, even in a gloo group of CPU ranks; if
       it fails, PyNcclCommunicator disables itself. Removable when init_model_parallel_group
       (srt/distributed/parallel_state.py) asks the platform whether to use NCCL.
    3. `srt/state_capturer/base.BaseHostCache`, which stores the routed experts of cached tokens. It allocates
       pinned memory, which torch supports only with a GPU ("Found no NVIDIA driver on your system"). Removable when it
       asks SRTPlatform.is_pin_memory_available, as other parts of SGLang do.
    4. `srt/sampling/penaltylib/repetition_penalty.apply_scaling_penalties`, which torch.compile compiles when the first
       request with a repetition penalty arrives: that ends the scheduler if there is no C++ compiler, and takes 18 s if
       there is one. srt/sampling/sampling_batch_info.py imports it by name, but calls it only with the overlap schedule
       or speculative decoding, which this platform does not use. Removable when SGLang does not compile it on CPUs.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.sampling.penaltylib import repetition_penalty
    from sglang.srt.state_capturer import base

    from tidemill_sglang_cpu.experts import PageableHostCache
    from tidemill_sglang_cpu.row_exact import enable_row_exact_matmul
    from tidemill_sglang_cpu.sampling import apply_scaling_penalties

    batch_invariant_ops.enable_batch_invariant_mode = enable_row_exact_matmul
    pynccl.NCCLLibrary = _no_nccl  # pyright: ignore[reportAttributeAccessIssue]
    base.BaseHostCache = PageableHostCache  # pyright: ignore[reportAttributeAccessIssue]
    repetition_penalty.apply_scaling_penalties = apply_scaling_penalties


def _no_nccl(path: str | None = None) -> NoReturn:
    raise OSError("NCCL is not used on the CPU")
