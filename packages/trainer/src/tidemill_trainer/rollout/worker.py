"""A Ray actor with a stock SGLang engine."""

import asyncio
import importlib.metadata
import json
import os
import threading
from collections.abc import Coroutine, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import torch
from tidemill_dispatch import Dispatch, Worker, register
from tidemill_engines import ModelConfig
from tidemill_rollout import Generation, SamplingParams
from tidemill_rollout.sglang import SGLangEngine
from tidemill_rollout.sglang_kernels import compile_kernels
from tidemill_weight_update import BucketHandle, PauseMode, Request

from tidemill_trainer.config import RolloutConfig
from tidemill_trainer.gpus import Gpu
from tidemill_trainer.out_of_memory import ENGINE_STARTS
from tidemill_trainer.rollout.engine_files import EngineFiles, unlink_mapped_files
from tidemill_trainer.rollout.exchange import serve
from tidemill_trainer.stalls.member import join_run

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from tidemill_weight_update.sglang import LocalEngine

T = TypeVar("T")

# Tags of SGLang for memory that it can free.
_WEIGHTS = frozenset({"weights"})
_SERVING = frozenset({"kv_cache", "cuda_graph"})

_PREFILL_TOKENS = 32768
"""Prompt tokens of a batch: the prompts of a step arrive together, and each prefill batch takes 20 ms or more."""

_MAX_GRAPH = 512
"""Largest batch of SGLang's CUDA graphs for decoding; larger ones compute longer than their kernels need to start."""


def engine_arguments(
    config: RolloutConfig,
    model: ModelConfig,
    *,
    num_episodes: int = _MAX_GRAPH,
    return_routed_experts: bool = False,
    enable_memory_saver: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments of `sglang.Engine` for a configuration.

    `config.engine_args` overrides all others, except those of weight updates: its `custom_weight_loader` is added to
    theirs, and its `json_model_override_args` to those of `config.quantization`.

    Args:
        config: settings of the engine.
        model: its model.
        num_episodes: number of episodes that it generates at the same time.
        return_routed_experts, enable_memory_saver: SGLang's arguments of these names.
    """
    from tidemill_weight_update.fp8 import fp8_launch_args
    from tidemill_weight_update.sglang import sglang_launch_args

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "trust_remote_code": model.trust_remote_code,
        "device": device,
        "dtype": config.dtype,
        "tp_size": config.tensor_parallel_size,
        "skip_tokenizer_init": True,
        "enable_deterministic_inference": config.deterministic,
        "sleep_on_idle": True,  # otherwise the scheduler keeps a CPU core busy during training
    }
    if config.max_total_tokens is not None:
        arguments["max_total_tokens"] = config.max_total_tokens
    if return_routed_experts:
        arguments["enable_return_routed_experts"] = True
    if enable_memory_saver:
        arguments["enable_memory_saver"] = True
    if device == "cuda":
        arguments["mem_fraction_static"] = config.mem_fraction_static
        arguments["cuda_graph_max_bs_decode"] = min(num_episodes, _MAX_GRAPH)
        if not config.deterministic and config.top_p == 1 and config.top_k == -1:
            arguments["sampling_backend"] = "tidemill"
        arguments["chunked_prefill_size"] = arguments["max_prefill_tokens"] = _PREFILL_TOKENS
        arguments["disable_prefill_cuda_graph"] = True  # a minute of the first start, nothing for large batches
    else:
        _require_cpu_plugin()
    if device == "cuda" and str(config.engine_args.get("kv_cache_dtype")).startswith("fp8"):
        arguments["page_size"] = 64  # FlashAttention-3 reads float8 from pages of one token no faster than bfloat16
    arguments |= config.engine_args
    if config.quantization == "fp8":
        given = json.loads(arguments.get("json_model_override_args", "{}"))
        arguments |= fp8_launch_args()
        overrides = given | json.loads(arguments["json_model_override_args"])
        arguments["json_model_override_args"] = json.dumps(overrides)
    return arguments | sglang_launch_args(arguments.get("custom_weight_loader", ()))


def engine_name(number: int) -> str:
    """Return the name of an engine, which is also that of its log and of its group of one worker."""
    return f"rollout_{number}"


def use_gpus(gpus: Sequence[Gpu | None], rank: int, num_ranks: int) -> None:
    """Make the GPUs of training workers those of the engine that this process starts.

    Args:
        gpus: those of all training workers; None, or nothing, leaves the GPUs as they are.
        rank: rank of the engine.
        num_ranks: ranks of each engine.

    Raises:
        RuntimeError: one of them is on another node.
    """
    mine = [gpu for gpu in gpus[rank * num_ranks : (rank + 1) * num_ranks] if gpu is not None]
    node_id = ray.get_runtime_context().get_node_id()
    if any(gpu.node_id != node_id for gpu in mine):
        raise RuntimeError(
            f"engine {rank} must be on the node of the training workers whose GPUs it uses in turns, which are on "
            f'{sorted({gpu.node_id for gpu in mine})}, but it is on {node_id}; set placement.engines="separate"'
        )
    if mine:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.visible for gpu in mine)


def _require_cpu_plugin() -> None:
    plugins = importlib.metadata.entry_points(group="sglang.srt.platforms")
    if "tidemill_cpu" not in plugins.names:
        raise RuntimeError(
            "stock SGLang requires a platform plugin on a CPU; install it: pip install tidemill-sglang-cpu"
        )


class RolloutWorker(Worker):
    """One engine, which generates for episode workers.

    The event loop of the engine runs in a thread, so that it serves requests at any time, also during the calls of this
    worker.

    Args:
        config: sampling parameters and engine settings.
        model: model that the engine loads at its start.
        number: number of the engine in the run.
        files: sockets and shared memory of the engine, which the driver removes.
        log_dir: folder for the log of this process and the engine's processes.
        num_episodes: number of episodes that the engine generates at the same time.
        return_routed_experts: return the experts that a MoE model chose for each token of a rollout.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: ModelConfig,
        number: int,
        files: EngineFiles,
        log_dir: str,
        *,
        num_episodes: int,
        return_routed_experts: bool = False,
    ) -> None:
        join_run(log_dir, engine_name(number))
        self._number = number
        self._config = config
        self._model = model
        self._files = files
        self._num_episodes = num_episodes
        self._return_routed_experts = return_routed_experts
        self._arguments: dict[str, Any] | None = None
        self._engine: Engine | None = None
        self._client: LocalEngine | None = None
        self._requests: SGLangEngine | None = None
        self._released: set[str] = set()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def prepare_engine(self, gpus: Sequence[Gpu | None] = ()) -> None:
        """Import SGLang and start to compile its kernels, which requires no GPU memory.

        Args:
            gpus: in turns, the GPUs of the training workers by rank, of which the engine uses those of its ranks.
        """
        print(ENGINE_STARTS, flush=True)  # noqa: T201 - into the engine's log
        use_gpus(gpus, self._number, self._config.tensor_parallel_size)
        self._arguments = engine_arguments(
            self._config,
            self._model,
            num_episodes=self._num_episodes,
            return_routed_experts=self._return_routed_experts,
            enable_memory_saver=any(gpus),
        )
        if self._arguments["device"] == "cuda":
            compile_kernels(self._arguments)
        import sglang.srt.entrypoints.engine  # noqa: F401

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def start_engine(self, gpus: Sequence[Gpu | None] = ()) -> None:
        """Start SGLang. On a CPU, most of the time is spent on imports.

        Args:
            gpus: those of `prepare_engine`, which is called first if it has not been.
        """
        if self._arguments is None:
            self.prepare_engine(gpus)
        from sglang.srt.entrypoints.engine import Engine
        from tidemill_weight_update.sglang import LocalEngine

        arguments = self._arguments
        assert arguments is not None
        instance_id = self._files.claim(self._number)
        os.environ["SGLANG_FORCE_STREAM_INTERVAL"] = str(2**31)  # only complete responses, not one part per 50 tokens
        # Otherwise FP8 engines multiply each matrix once for every number of tokens up to 65,536 when they start.
        os.environ.setdefault("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", "1")
        if "nccl_port" not in arguments:
            os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = self._files.store(self._number)
        self._engine = Engine(**arguments)
        actual = self._engine.port_args.instance_id
        if actual != instance_id:  # SGLang only logs a hook that it cannot apply
            raise RuntimeError(
                "this SGLang version ignores the plugin hook that names its shared memory "
                f"(expected {instance_id!r}, got {actual!r}); install sglang==0.5.17"
            )
        unlink_mapped_files()
        self._engine.freeze_gc()  # otherwise each weight update collects all objects that SGLang's imports created
        threading.Thread(target=self._engine.loop.run_forever, name="engine", daemon=True).start()
        self._client = LocalEngine(self._engine, timeout_s=self._config.timeout_s)
        experts = {"return_routed_experts": True} if self._return_routed_experts else {}
        recomputes = self._config.recompute_kv_cache
        if not recomputes and self._engine.server_args.disable_radix_cache:
            raise ValueError(
                "rollout.recompute_kv_cache=false requires SGLang's prefix cache, which is disabled: by "
                "disable_radix_cache in rollout.engine_args, by rollout.deterministic with an attention backend that "
                "has none, or for the reason in the engine's log; drop these keys, or recompute_kv_cache=false"
            )
        self._requests = SGLangEngine(self._engine, arguments=experts, recompute_kv_cache=recomputes)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def connect_episode_workers(self, workers: Sequence[Any]) -> None:
        """Run the requests of episode workers from now on (see `serve`).

        Args:
            workers: handles of their actors.
        """
        assert self._requests is not None, "call start_engine() first"
        for worker in workers:
            self._submit(serve(self._requests, worker, self._number))

    def generate(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Generation]:
        """Sample a continuation of each prompt of token ids, at the same time."""
        engine = self._requests
        assert engine is not None, "call start_engine() first"

        async def run() -> list[Generation]:
            calls = (engine.generate(ids, sampling, session_id="") for ids, sampling in requests)
            return await asyncio.gather(*calls)

        return self._submit(run()).result(self._config.timeout_s)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def interrupt(self) -> None:
        """Stop all requests between two tokens, until `proceed` (see `SGLangEngine.interrupt`)."""
        assert self._requests is not None, "call start_engine() first"
        self._submit(self._requests.interrupt()).result(self._config.timeout_s)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def proceed(self) -> None:
        """Continue the requests that `interrupt` stopped."""
        assert self._requests is not None, "call start_engine() first"
        self._require_engine().loop.call_soon_threadsafe(self._requests.proceed)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def release(self) -> None:
        """Interrupt all requests, and free the memory of weights and KV pool."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        tags = (_WEIGHTS | _SERVING) - self._released
        if not tags:
            return
        self.interrupt()
        self.flush_cache()  # waits for requests whose caller has gone: SGLang crashes if it releases while one runs
        request = ReleaseMemoryOccupationReqInput(tags=sorted(tags))
        self._submit(self._manager.release_memory_occupation(request, None)).result(self._config.timeout_s)
        self._released |= tags

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def resume_weights(self) -> None:
        """Allocate the memory of the weights, whose content is undefined until they are updated."""
        self._resume(_WEIGHTS)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def resume_serving(self) -> None:
        """Allocate the memory of the KV pool, and continue the requests that `release` interrupted."""
        self._resume(_SERVING)
        self.proceed()

    def _resume(self, tags: Set[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        tags &= self._released  # SGLang crashes when it resumes what it has not released
        if tags:
            request = ResumeMemoryOccupationReqInput(tags=sorted(tags))
            self._submit(self._manager.resume_memory_occupation(request, None)).result(self._config.timeout_s)
            self._released -= tags

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._require_engine().loop)

    def _require_engine(self) -> "Engine":
        if self._engine is None:
            raise RuntimeError("the engine is not running; call start_engine() first")
        return self._engine

    @property
    def _manager(self) -> "TokenizerManager":
        manager = self._require_engine().tokenizer_manager
        assert manager is not None
        return manager

    def queue(self) -> str:
        """Describe the requests that the engine holds, for reports about a run that makes no progress."""
        if self._engine is None:
            return "the engine has not started"
        released = f"; released: {', '.join(sorted(self._released))}" if self._released else ""
        return f"{len(self._manager.rid_to_state)} unfinished requests{released}"

    def devices(self) -> str:
        """Return the devices of the engine, such as "cuda 0,1", which are those of CUDA_VISIBLE_DEVICES."""
        device = self._require_engine().server_args.device
        return device if device == "cpu" else f"{device} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"

    def has_loader(self) -> bool:
        return self._require_client().has_loader

    def load(self, request: Request, *, flush_cache: bool) -> None:
        self._require_client().load(request, flush_cache=flush_cache)

    def load_bucket(self, bucket: BucketHandle) -> None:
        self._require_client().load_bucket(bucket)

    def flush_cache(self) -> None:
        self._require_client().flush_cache()

    def pause(self, mode: PauseMode) -> None:
        self._require_client().pause(mode)

    def resume(self) -> None:
        self._require_client().resume()

    def set_weight_version(self, version: str) -> None:
        self._require_client().set_weight_version(version)

    def get_weight_version(self) -> str:
        return self._require_client().get_weight_version()

    def _require_client(self) -> "LocalEngine":
        if self._client is None:
            raise RuntimeError("the engine is not running; call start_engine() first")
        return self._client
