"""The one place where stock SGLang is changed in memory, on activation only. Paths are of SGLang 0.5.17."""

from typing import NoReturn


def apply_patches() -> None:
    """Replaces three names; there is no hook for any.

    1. `srt/batch_invariant_ops.enable_batch_invariant_mode`, which ModelRunner calls for
       enable_deterministic_inference. SGLang's raises "No supported accelerator (CUDA/XPU) available" on every
       out-of-tree platform (get_dispatch_device_backend in srt/utils/common.py) and has only Triton kernels to offer.
       Upstream: a method of SRTPlatform.
    2. `srt/distributed/device_communicators/pynccl.NCCLLibrary`, the loader of the NCCL that comes with torch's
       default Linux wheel. Where it loads, PyNcclCommunicator wants a CUDA device, even in a gloo group of CPU ranks;
       where it does not, PyNcclCommunicator disables itself. Upstream: use_pynccl in
       init_model_parallel_group (srt/distributed/parallel_state.py) could ask the platform.
    3. `srt/state_capturer/base.BaseHostCache`, where enable_return_routed_experts keeps the experts of cached tokens.
       It asks for pinned memory, which torch has only with a GPU ("Found no NVIDIA driver on your system").
       Upstream: it could ask SRTPlatform.is_pin_memory_available, as other parts of SGLang do.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.state_capturer import base

    from tidemill_sglang_cpu.experts import PageableHostCache
    from tidemill_sglang_cpu.row_exact import enable_row_exact_matmul

    batch_invariant_ops.enable_batch_invariant_mode = enable_row_exact_matmul
    pynccl.NCCLLibrary = _no_nccl  # pyright: ignore[reportAttributeAccessIssue]
    base.BaseHostCache = PageableHostCache  # pyright: ignore[reportAttributeAccessIssue]


def _no_nccl(path: str | None = None) -> NoReturn:
    raise OSError("NCCL is not used on the CPU")
