"""What every Megatron engine is, whatever its model computes: life cycle, optimizer and export."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import Float16Module

from tidemill_engines.agreement import gather, together
from tidemill_engines.base import BaseEngine
from tidemill_engines.checkpoint_folder import Progress, read_progress
from tidemill_engines.config import CheckpointConfig, Dtype, ModelConfig, OptimizerConfig
from tidemill_engines.hf_export import copy_side_files, write_weights
from tidemill_engines.megatron import checkpoint
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_engines.megatron.cpu import on_cpu
from tidemill_engines.megatron.groups import MegatronGroups, close_groups, make_groups, own_placement
from tidemill_engines.megatron.layout import padded_vocab_size
from tidemill_engines.megatron.model import build_chunks, transformer_config
from tidemill_engines.megatron.optimizer import apply_gradient, build_optimizer
from tidemill_engines.megatron.packed import Division
from tidemill_engines.megatron.pipeline import finalize_without_scaling, is_last_stage
from tidemill_engines.megatron.weights import MegatronWeights, unwrapped
from tidemill_engines.optimizer import learning_rate
from tidemill_engines.process_group import resolve_device
from tidemill_engines.safetensors_files import SafetensorsFiles
from tidemill_engines.weight_shard import WeightShard

T = TypeVar("T")


class MegatronEngine(BaseEngine):
    """A Hugging Face model as Megatron's; abstract in the step, which depends on the type of model.

    Megatron keeps its process groups once a process, so a process has one such engine at a time.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: MegatronConfig,
        optimizer: OptimizerConfig | None,
        checkpoint: CheckpointConfig,
    ) -> None:
        if not isinstance(engine, MegatronConfig):
            raise TypeError(f"the Megatron engine is configured by a MegatronConfig, got a {type(engine).__name__}")
        super().__init__(model=model, engine=engine, optimizer=optimizer, checkpoint=checkpoint)  # type: ignore[arg-type]
        self.config = engine
        self.device = torch.device("meta")
        self.division = Division()
        self.chunks: list[DistributedDataParallel] = []
        self._redirections = ExitStack()
        self._architecture: Architecture | None = None
        self._groups: MegatronGroups | None = None
        self._weights: MegatronWeights | None = None
        self._optimizer: MegatronOptimizer | None = None

    def initialize(self) -> None:
        if self._groups is not None:
            raise RuntimeError("the engine is initialized already; close() it first")
        self.device = resolve_device(self.config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            self._redirections.enter_context(on_cpu())
        try:
            self._groups = make_groups(
                self.config, self.device, self._read, seed=self.config.seed, timeout_s=self.config.timeout_s
            )
            self._build()
        except BaseException:
            self.close()
            raise
        self.step = self.skipped_steps = 0

    def _read(self, world_size: int) -> None:
        self._architecture = Architecture.read(Path(self.model_config.path))
        self.config.check(self._architecture, world_size)

    def _build(self) -> None:
        parallel, dtype = self.config, getattr(torch, self.config.param_dtype)
        self.division = Division(
            cp_rank=dist.get_rank(self.groups.cp),
            cp_size=parallel.context_parallel_size,
            sp_size=parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1,
        )
        config = transformer_config(self.architecture, parallel, dtype)
        config.finalize_model_grads_func = finalize_without_scaling  # type: ignore[assignment]
        models = [model.to(self.device) for model in build_chunks(self.architecture, config)]
        self._weights = MegatronWeights(models, self.architecture, own_placement(), self.groups.control)
        with SafetensorsFiles(Path(self.model_config.path)) as files, together(self.groups.control):
            self._weights.load(files)
        wrapped = models if dtype == torch.float32 else [Float16Module(config, model) for model in models]
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.config.use_distributed_optimizer,
            overlap_grad_reduce=self.config.overlap_grad_reduce,
        )
        self.chunks = [
            DistributedDataParallel(config, settings, model, disable_bucketing=number > 0)
            for number, model in enumerate(wrapped)
        ]
        if self.config.overlap_grad_reduce:
            no_sync: Any = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        if self.optimizer_config is not None:
            self.reset_optimizer(self.optimizer_config)
        self._train(training=False)

    def close(self) -> None:
        groups, self._groups = self._groups, None
        self._weights = self._optimizer = None
        self.chunks = []
        try:
            if groups is not None:
                close_groups(groups)
        finally:
            self._redirections.close()

    @property
    def groups(self) -> MegatronGroups:
        """What this engine communicates with; RuntimeError before `initialize` and after `close`."""
        return _initialized(self._groups)

    @property
    def architecture(self) -> Architecture:
        """Of the model; RuntimeError before `initialize`."""
        return _initialized(self._architecture)

    @property
    def weights(self) -> MegatronWeights:
        """RuntimeError before `initialize` and after `close`."""
        return _initialized(self._weights)

    @property
    def optimizer(self) -> MegatronOptimizer:
        """RuntimeError for an engine without an optimizer, or before `initialize`."""
        if self._optimizer is None:
            raise RuntimeError("this engine has no optimizer; create it with an OptimizerConfig and initialize() it")
        return self._optimizer

    def head(self) -> tuple[torch.Tensor, int, int]:
        """On the last stage, the rows of the head of this rank, the token of the first, and how many are tokens."""
        model: Any = unwrapped(self.chunks[-1])
        is_tied = self.architecture.tie_word_embeddings
        weight = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
        size = self.config.tensor_model_parallel_size
        rows = padded_vocab_size(self.architecture.vocab_size, size) // size
        first = dist.get_rank(self.groups.tp) * rows
        return weight, first, max(0, min(rows, self.architecture.vocab_size - first))

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        with self._mode(training=True):
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        with self._mode(training=False), torch.no_grad():
            yield

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        was_training = self.chunks[0].training
        self._train(training=training)
        try:
            yield
        finally:
            self._train(training=was_training)

    def _train(self, *, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def optimizer_zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def grad_norm(self) -> float:
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def apply_gradient(self, norm: float) -> None:
        assert self.optimizer_config is not None
        apply_gradient(self.optimizer, self.optimizer_config, norm, learning_rate(self.optimizer_config, self.step))

    def find_nonfinite(self) -> list[str]:
        own = [
            name
            for chunk in self.chunks
            for name, param in unwrapped(chunk).named_parameters()
            if not bool(torch.isfinite(param.main_grad).all())  # type: ignore[attr-defined]
        ]
        of_ranks = gather(own[:3], self.groups.control)
        return [f"rank {rank}: {name}" for rank, names in enumerate(of_ranks) for name in names][:3]

    def lr_scheduler_step(self) -> float:
        assert self.optimizer_config is not None
        used = learning_rate(self.optimizer_config, self.step)
        self.step += 1
        return used

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        if self.optimizer_config is None:
            raise ValueError("this engine was made without an optimizer; create it with an OptimizerConfig to train")
        self._optimizer = build_optimizer(
            self.chunks,
            optimizer,
            dtype=getattr(torch, self.config.param_dtype),
            distributed=self.config.use_distributed_optimizer,
        )
        self.optimizer_config = optimizer
        self.step = self.skipped_steps = 0

    def get_per_tensor_param(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.full_tensors(getattr(torch, dtype or self.config.param_dtype))

    def get_per_tensor_shards(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
        yield from self.weights.shards(None if dtype is None else getattr(torch, dtype))

    def save_checkpoint(self, path: str | Path) -> None:
        if self.checkpoint_config.asynchronous:
            raise ValueError("CheckpointConfig.asynchronous: the Megatron engine saves at once; leave it out")
        progress = Progress(
            step=self.step,
            skipped_steps=self.skipped_steps,
            world_size=dist.get_world_size(),
            has_optimizer=self._optimizer is not None,
        )
        keep_last = self.checkpoint_config.keep_last
        checkpoint.save(Path(path), self.chunks, self._optimizer, progress, self.groups.control, keep_last=keep_last)

    def finish_checkpoint(self) -> None:
        """Does nothing: a checkpoint is whole when `save_checkpoint` returns."""

    def load_checkpoint(self, path: str | Path) -> None:
        progress = read_progress(Path(path), self.groups.control)
        if self._optimizer is not None and not progress.has_optimizer:
            raise ValueError(f"{path} was saved by an engine without an optimizer, so training cannot continue from it")
        checkpoint.load(Path(path), self.chunks, self._optimizer, progress, self.groups.control)
        self.step, self.skipped_steps = progress.step, progress.skipped_steps

    def save_hf(self, path: str | Path, dtype: Dtype | None = None) -> None:
        from transformers import AutoConfig

        target, source = Path(path), Path(self.model_config.path)
        with together(self.groups.control):
            target.mkdir(parents=True, exist_ok=True)
            if dist.get_rank() == 0:
                config = AutoConfig.from_pretrained(source)
                config.dtype = dtype or self.config.param_dtype
                config.save_pretrained(target)
                copy_side_files(source, target)
        write_weights(lambda: self.get_per_tensor_param(dtype), target, self.groups.control)

    def get_data_parallel_rank(self) -> int:
        return parallel_state.get_data_parallel_rank()

    def get_data_parallel_size(self) -> int:
        return parallel_state.get_data_parallel_world_size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.data_parallel

    def is_mp_src_rank_with_outputs(self) -> bool:
        return is_last_stage() and dist.get_rank(self.groups.tp) == 0 and dist.get_rank(self.groups.cp) == 0


def _initialized(part: T | None) -> T:
    if part is None:
        raise RuntimeError("the engine is not initialized; call initialize() first")
    return part
