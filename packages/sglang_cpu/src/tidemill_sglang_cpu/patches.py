"""The one place where stock SGLang is changed in memory, on activation only. Paths are of SGLang 0.5.17."""

from typing import NoReturn


def apply_patches() -> None:
    """Replaces two names; there is no hook for either.

    1. `srt/batch_invariant_ops.enable_batch_invariant_mode`, which ModelRunner calls for
       enable_deterministic_inference. SGLang's raises "No supported accelerator (CUDA/XPU) available" on every
       out-of-tree platform (get_dispatch_device_backend in srt/utils/common.py) and has only Triton kernels to offer.
       Upstream: a method of SRTPlatform.
    2. `srt/distributed/device_communicators/pynccl.NCCLLibrary`, the loader of the NCCL that comes with torch's
       default Linux wheel. Where it loads, PyNcclCommunicator wants a CUDA device, even in a gloo group of CPU ranks;
       where it does not, PyNcclCommunicator disables itself. Upstream: use_pynccl in
       init_model_parallel_group (srt/distributed/parallel_state.py) could ask the platform.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.distributed.device_communicators import pynccl

    from tidemill_sglang_cpu.row_exact import enable_row_exact_matmul

    batch_invariant_ops.enable_batch_invariant_mode = enable_row_exact_matmul
    pynccl.NCCLLibrary = _no_nccl  # pyright: ignore[reportAttributeAccessIssue]


def _no_nccl(path: str | None = None) -> NoReturn:
    raise OSError("NCCL is not used on the CPU")
