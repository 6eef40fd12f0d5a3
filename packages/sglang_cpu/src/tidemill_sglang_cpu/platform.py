"""Platform class that SGLang loads when the plugin is active."""

import os
import pkgutil
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from tidemill_sglang_cpu.activation import check_environment
from tidemill_sglang_cpu.support import SUPPORTED_MODULES, check_arguments, check_model, resolve_dtype

# SGLang's defaults fill the memory of the machine with KV cache.
DEFAULT_MAX_TOTAL_TOKENS = 65536
DEFAULT_MEM_FRACTION = 0.6
# SGLang avoids Triton kernels with this backend name, so the batched backend is registered under it.
_ATTENTION_BACKEND = "torch_native"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on PyTorch's CPU kernels, without vLLM, sgl-kernel, AMX or a compiler."""

    _enum = PlatformEnum.OOT

    def __init__(self) -> None:
        check_environment()

    def get_device(self, device_id: int | None = 0) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "cpu"  # SGLang splits the result as a string to find the default device

    def empty_cache(self) -> None:
        """Do nothing: torch caches no CPU memory. SGLang's default collects garbage, 0.5 s per flush_cache."""

    def get_default_attention_backend(self) -> str:
        return _ATTENTION_BACKEND

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set defaults and refuse unsupported arguments.

        Called in the process that creates the engine or server, before any other is started, so that errors reach the
        caller: an error in a scheduler makes SGLang kill the parent process.

        Raises:
            ValueError: the model, its dtype or an argument is not supported.
        """
        hf_config = server_args.get_model_config().hf_config
        check_model(hf_config)
        check_arguments(server_args)
        _register_backends()
        server_args.dtype = resolve_dtype(server_args.dtype, hf_config)
        del server_args.model_config  # cached with SGLang's default dtype
        server_args.attention_backend = self.get_default_attention_backend()
        server_args.sampling_backend = "pytorch"
        server_args.disable_custom_all_reduce = True
        server_args.disable_overlap_schedule = True  # there is no second stream to overlap with
        server_args.sleep_on_idle = True  # otherwise an idle scheduler uses a whole core
        _disable_graphs(server_args)
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = DEFAULT_MEM_FRACTION
        _set_up_ranks(server_args.tp_size)
        _skip_other_models()

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from tidemill_sglang_cpu.allocator import TokenAllocator

        return TokenAllocator

    def init_backend(self) -> None:
        """Register backends and apply patches; called once in each process that may run the model."""
        import threading

        import tqdm

        # tqdm's default lock is a named semaphore. SGLang stops its schedulers with SIGKILL, so each would leave a
        # semaphore in /dev/shm.
        tqdm.tqdm.set_lock(threading.RLock())
        _register_backends()
        from tidemill_sglang_cpu.experts import register_experts
        from tidemill_sglang_cpu.patches import apply_patches

        register_experts()
        apply_patches()


def _register_backends() -> None:
    """Register the attention backend and the sampler with SGLang. Idempotent."""
    from sglang.srt import server_args
    from sglang.srt.layers import sampler
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    from tidemill_sglang_cpu.attention import BatchedAttnBackend
    from tidemill_sglang_cpu.sampling import SeededSampler

    if ATTENTION_BACKENDS[_ATTENTION_BACKEND] is BatchedAttnBackend:
        return
    register_attention_backend(_ATTENTION_BACKEND)(BatchedAttnBackend)
    server_args.add_deterministic_attention_backend_choices([_ATTENTION_BACKEND])
    server_args.add_radix_supported_deterministic_attention_backend_choices([_ATTENTION_BACKEND])
    # Deterministic inference requires the sampler name "pytorch", so that entry is replaced.
    sampler.register_sampler_backend("pytorch", SeededSampler)


def _disable_graphs(server_args: Any) -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend

    server_args.disable_cuda_graph = True
    server_args.cuda_graph_config.decode.backend = Backend.DISABLED
    server_args.cuda_graph_config.prefill.backend = Backend.DISABLED


def _set_up_ranks(tp_size: int) -> None:
    """Set environment variables of SGLang's tensor-parallel ranks, unless the user has set them."""
    name = "SGLANG_CPU_OMP_THREADS_BIND"
    current = os.environ.get(name, "")
    if current == _core_shares(current.count("|") + 1):  # of an earlier engine of this process
        del os.environ[name]
    if tp_size > 1:
        # SGLang's default does not allow more ranks than NUMA nodes.
        os.environ.setdefault(name, _core_shares(tp_size))
        # Use gloo instead of 24 MiB of shared memory, which would remain when SGLang stops a scheduler with SIGKILL.
        os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "0")


def _core_shares(tp_size: int) -> str:
    """Return a share of this process's cores for each rank, such as "0,2|1,3"."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    return "|".join(",".join(cores[rank::tp_size] or cores) for rank in range(tp_size))


def _skip_other_models() -> None:
    """Disable the import of model modules that this platform does not support.

    SGLang imports all of its 200 model modules to find their class names: 20 % of the start time of a scheduler.
    """
    package = pkgutil.resolve_name("sglang").__path__[0]
    modules = [module.name for module in pkgutil.iter_modules([os.path.join(package, "srt", "models")])]
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(set(modules) - SUPPORTED_MODULES)))
