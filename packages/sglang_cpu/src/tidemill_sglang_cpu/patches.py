"""The one place where stock SGLang is changed in memory, on activation only."""


def apply_patches() -> None:
    """Replaces `sglang.srt.batch_invariant_ops.enable_batch_invariant_mode`, which ModelRunner calls for
    enable_deterministic_inference.

    Reason: SGLang 0.5.17's version raises "No supported accelerator (CUDA/XPU) available" on any out-of-tree platform
    (get_dispatch_device_backend in srt/utils/common.py) and has only Triton kernels to offer. There is no hook for it:
    upstream, `SRTPlatform` could have an `enable_batch_invariant_mode` method.
    """
    from sglang.srt import batch_invariant_ops

    from tidemill_sglang_cpu.row_exact import enable_row_exact_matmul

    batch_invariant_ops.enable_batch_invariant_mode = enable_row_exact_matmul
