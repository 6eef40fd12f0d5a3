"""Compile the CUDA kernels of SGLang 0.5.17 that it compiles when it first runs a model on a machine.

SGLang compiles them one after the other, about 10 s each, and keeps them in `~/.cache/tvm-ffi`. `compile_kernels`
starts a process that compiles all of them at the same time while SGLang starts. Both hold the lock of a kernel while
they compile it, so SGLang waits for a kernel of this process and then loads it.
"""

import argparse
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig


def compile_kernels(engine_args: Mapping[str, Any]) -> None:
    """Start to compile the kernels of an engine for the GPU that this process sees, and return at once.

    An error is printed by the process that compiles; SGLang then compiles the kernel itself, as without this call.

    Args:
        engine_args: arguments of `sglang.Engine`: `model_path`, `dtype` (not "auto"), and optionally `tp_size` and
            `trust_remote_code`.
    """
    command = [sys.executable, "-m", "tidemill_rollout.sglang_kernels", engine_args["model_path"]]
    command += ["--dtype", engine_args["dtype"], "--tp-size", str(engine_args.get("tp_size", 1))]
    if engine_args.get("trust_remote_code"):
        command.append("--trust-remote-code")
    threading.Thread(target=subprocess.run, args=[command], name="compile kernels", daemon=True).start()


def kernels(config: PretrainedConfig, dtype: torch.dtype, tp_size: int) -> list[Callable[[], object]]:
    """Return functions that compile and load the kernels of a decoder with grouped-query attention.

    Args:
        config: configuration of the text model.
        dtype: dtype of its activations and of the KV cache.
        tp_size: size of tensor parallelism.
    """
    import flashinfer.norm
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
    from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row_bytes = max(1, config.num_key_value_heads // tp_size) * head_dim * dtype.itemsize
    found: list[Callable[[], object]] = [
        partial(_jit_fused_rope_module, True, head_dim, dtype, dtype),
        partial(_jit_kvcache_module, row_bytes, row_bytes),
    ]
    if config.model_type.startswith("qwen3"):
        found.append(partial(_jit_qknorm_module, head_dim, dtype))
    if flashinfer.norm._USE_CUDA_NORM:  # without nvidia-cutlass-dsl
        found.append(flashinfer.norm.get_norm_module)
    return found


def main() -> None:
    """Compile each kernel in a process of its own: SGLang passes the architecture to nvcc through the environment."""
    parser = argparse.ArgumentParser(description=compile_kernels.__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code).get_text_config()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=kernel) for kernel in kernels(config, getattr(torch, args.dtype), args.tp_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
