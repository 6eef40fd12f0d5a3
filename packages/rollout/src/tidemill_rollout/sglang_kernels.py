"""Compile the CUDA kernels of SGLang 0.5.17 that it compiles when it first runs a model on a machine.

SGLang compiles them one after the other, about 10 s each, and keeps them in `~/.cache/tvm-ffi`. `compile_kernels`
starts a process that compiles all of them at the same time while SGLang starts. Both lock a kernel's folder while they
compile it, so SGLang waits for a kernel that this process compiles.
"""

import argparse
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types with grouped-query attention and rotary embeddings of whole heads."""


def compile_kernels(engine_args: Mapping[str, Any]) -> None:
    """Start to compile the kernels of an engine for the GPU that this process sees, and return at once.

    The process that compiles prints errors; SGLang then compiles these kernels itself, as without this call.

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
    """Return functions that compile and load the kernels of a model; none for families that are not in `_FAMILIES`.

    Args:
        config: configuration of the text model.
        dtype: dtype of its activations and of the KV cache.
        tp_size: size of tensor parallelism.
    """
    if config.model_type not in _FAMILIES:
        return []
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
    from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row_bytes = max(1, config.num_key_value_heads // tp_size) * head_dim * dtype.itemsize
    found: list[Callable[[], object]] = [
        partial(_jit_fused_rope_module, True, head_dim, dtype, dtype),
        partial(_jit_kvcache_module, row_bytes, row_bytes),
        partial(activation_module, dtype),
        partial(_jit_clamp_position_module, torch.int64),
    ]
    if config.model_type in ("qwen3", "qwen3_moe"):
        found.append(partial(_jit_qknorm_module, head_dim, dtype))
    return found


def main() -> None:
    """Compile all kernels at the same time."""
    parser = argparse.ArgumentParser(description=compile_kernels.__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code).get_text_config()
    from sglang.kernels.jit.utils.arch import get_jit_cuda_arch

    # SGLang sets this variable while it compiles a kernel, and then restores it, whatever other threads do.
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = get_jit_cuda_arch().target_name
    found = kernels(config, getattr(torch, args.dtype), args.tp_size)
    with ThreadPoolExecutor() as pool:
        compiled = [pool.submit(kernel) for kernel in found]
    for each in compiled:
        if (error := each.exception()) is not None:
            traceback.print_exception(error)


if __name__ == "__main__":
    main()
