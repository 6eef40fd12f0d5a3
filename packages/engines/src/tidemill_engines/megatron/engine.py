"""What every Megatron engine is, whatever its model computes: life cycle, optimizer and export."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tidemill_engines.base import BaseEngine
from tidemill_engines.checkpoint.folder import Progress, read_progress
from tidemill_engines.checkpoint.saver import Saver
from tidemill_engines.config import CheckpointConfig, Dtype, ModelConfig, OptimizerConfig
from tidemill_engines.distributed.agreement import check_same, gather, together
from tidemill_engines.distributed.process_groups import resolve_device
from tidemill_engines.hf_weights.export import MAX_SHARD_SIZE, shard_bytes, start_export, write_weights
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles
from tidemill_engines.hf_weights.shard import WeightShard
from tidemill_engines.megatron import checkpoint
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.batch.packed import Division
from tidemill_engines.megatron.batch.pipeline import is_last_stage
from tidemill_engines.megatron.config import MegatronConfig, check_settings
from tidemill_engines.megatron.model.build import HiddenStatesModel, build_chunks, transformer_config
from tidemill_engines.megatron.model.transformer_engine import implementation
from tidemill_engines.megatron.moe.batch import check_moe
from tidemill_engines.megatron.optimizer import (
    apply_gradient,
    build_optimizer,
    optimizer_parts,
    own_tensors,
    reset_state,
)
from tidemill_engines.megatron.parallel.data_parallel import (
    Gradients,
    grad_buffers,
    wait_for_weight,
    wrap_chunks,
)
from tidemill_engines.megatron.parallel.groups import MegatronGroups, close_groups, make_groups, own_placement
from tidemill_engines.megatron.patches.context import apply_patches
from tidemill_engines.megatron.patches.data_parallel import require_param_gather
from tidemill_engines.megatron.patches.dispatcher import release_activations
from tidemill_engines.megatron.patches.grad_norm import grad_norm
from tidemill_engines.megatron.weights.hf_weights import MegatronWeights, global_name, unwrapped
from tidemill_engines.offload import Parked, Parking
from tidemill_engines.optimizer import learning_rate

T = TypeVar("T")


class MegatronEngine(BaseEngine):
    """A Hugging Face model as Megatron's; abstract in the step, which depends on the type of model.

    Megatron keeps its process groups once a process, so a process has one such engine at a time.

    Attributes:
        new_weights: names of the model that a checkpoint may lack; they start at zero.
        unused_weights: names of a checkpoint that the model has no place for.
        counted_model: transformers' class of the same model, by which `performance` counts operations.
    """

    new_weights: tuple[str, ...] = ()
    unused_weights: tuple[str, ...] = ()
    counted_model: Any = AutoModelForCausalLM

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
        check_settings(model, optimizer)
        super().__init__(model=model, engine=engine, optimizer=optimizer, checkpoint=checkpoint)  # type: ignore[arg-type]
        self.config = engine
        self.device = torch.device("meta")
        self.division = Division()
        self.chunks: list[DistributedDataParallel] = []
        self._patches = ExitStack()
        self._architecture: Architecture | None = None
        self._groups: MegatronGroups | None = None
        self._weights: MegatronWeights | None = None
        self._optimizer: MegatronOptimizer | None = None
        self._parking = Parking({})
        self._saver = Saver()
        self._counted: PreTrainedModel | None = None
        self._gradients = Gradients([], overlap=False)
        self._weights_are_whole = True  # not while other ranks' part of an update has yet to be gathered

    def initialize(self) -> None:
        if self._groups is not None:
            raise RuntimeError("the engine is initialized already; close() it first")
        self.device = self.meter.device = resolve_device(self.config.device)
        self._patches.enter_context(apply_patches(self.device))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            self._groups = make_groups(
                self.config, self.device, self._read, seed=self.config.seed, timeout_s=self.config.timeout_s
            )
            check_same(self.architecture, f"config.json in {self.model_config.path}", self.groups.control)
            self._build()
        except BaseException:
            self.close()
            raise
        self.step = self.skipped_steps = 0
        self._weights_are_whole = True

    def _read(self, world_size: int) -> None:
        self._architecture = self.read_architecture()
        self.config.check(self._architecture, world_size)
        check_moe(self.model_config, self.config, self._architecture, self.device)

    def read_architecture(self) -> Architecture:
        """The architecture of the model at `ModelConfig.path`."""
        return Architecture.read(Path(self.model_config.path))

    def adapt(self, model: HiddenStatesModel) -> None:
        """Changes a freshly made chunk of the model into what this engine trains."""

    def _build(self) -> None:
        parallel, dtype = self.config, getattr(torch, self.config.param_dtype)
        self.division = Division(
            cp_rank=dist.get_rank(self.groups.cp),
            cp_size=parallel.context_parallel_size,
            sp_size=parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1,
        )
        config = transformer_config(
            self.architecture,
            parallel,
            dtype,
            implementation=implementation(parallel.transformer_impl, self.architecture, self.device, dtype),
            fused=self.config.fuse_elementwise and self.device.type == "cuda",
            recompute=self.config.recomputed(self.model_config),
        )
        models = build_chunks(self.architecture, config)
        for model in models:
            self.adapt(model)
            model.to(self.device).requires_grad_(self.optimizer_config is not None)
        group = _initialized(dist.group.WORLD)  # also takes tensors on GPUs
        self._weights = MegatronWeights(models, self.architecture, own_placement(), group)
        self._fill_weights()
        self.chunks = wrap_chunks(models, config, self.config, is_trained=self.optimizer_config is not None)
        self._gradients = Gradients(self.chunks, overlap=self.config.overlap_grad_reduce)
        if self.optimizer_config is not None:
            self._optimizer = build_optimizer(
                self.chunks,
                self.optimizer_config,
                dtype=dtype,
                distributed=parallel.use_distributed_optimizer,
                overlap_param_gather=parallel.overlap_param_gather,
            )
        self._train(training=False)
        grads = Parked(lambda: grad_buffers(self.chunks), are_zero=lambda: self._gradients.are_zero)
        kinds = {
            "params": (self.config.param_offload, Parked(self._params)),
            "grads": (self.config.grad_offload, grads),
            "optimizer": (self.config.optimizer_offload, Parked(self._optimizer_tensors)),
        }
        self._parking = Parking({kind: parked for kind, (wanted, parked) in kinds.items() if wanted})

    def _fill_weights(self) -> None:
        model = self.model_config
        if model.init_seed is not None:
            self.weights.draw(model.init_seed, self.architecture.initializer_range, zero=self.new_weights)
            return
        with together(self.groups.control), SafetensorsFiles(Path(model.path)) as files:
            self.weights.load(files, new=self.new_weights, unused=self.unused_weights)

    def _params(self) -> Iterator[torch.Tensor]:
        return (param for chunk in self.chunks for param in chunk.parameters())

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        return iter(()) if self._optimizer is None else own_tensors(self._optimizer, list(self._params()))

    def close(self) -> None:
        try:
            self._saver.close()
        finally:
            groups, self._groups = self._groups, None
            self._architecture = self._weights = self._optimizer = None
            release_activations(self.chunks)
            self.chunks = []
            self._gradients = Gradients([], overlap=False)
            self._parking = Parking({})
            try:
                if groups is not None:
                    close_groups(groups)
            finally:
                self._patches.close()
            del groups
            gc.collect()  # Megatron's modules hold groups in cycles, and gloo's threads end with the last reference

    @property
    def groups(self) -> MegatronGroups:
        """What this engine communicates with; RuntimeError before `initialize` and after `close`."""
        return _initialized(self._groups)

    @property
    def architecture(self) -> Architecture:
        """Of the model; RuntimeError before `initialize` and after `close`."""
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

    def head(self) -> tuple[torch.Tensor, int]:
        """On the last stage, the rows of the head that this rank has, without padding, and the token of the first."""
        chunk = self.chunks[-1]
        model: Any = unwrapped(chunk)
        is_tied = self.architecture.tie_word_embeddings
        weight = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
        wait_for_weight(chunk, weight)
        first = dist.get_rank(self.groups.tp) * len(weight)
        num_tokens = max(0, self.architecture.vocab_size - first)
        return weight if num_tokens >= len(weight) else weight[:num_tokens], first

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        with self._mode(training=True), self._parking.at_hand("params", "grads", "optimizer"):
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        with self._mode(training=False), self._whole_weights():
            yield

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        _initialized(self._weights)
        was_training = self.chunks[0].training
        self._train(training=training)
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(training):
                yield
        finally:
            self._train(training=was_training)

    def _train(self, *, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def check_at_hand(self, *kinds: str) -> None:
        """Raises RuntimeError if "params", "grads" or "optimizer" are asked for and away on the CPU."""
        self._parking.check(*kinds)

    def _gather_updates(self) -> None:
        """Completes the weights where an update is only gathered in the next forward of training. Collective."""
        if not self._weights_are_whole:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
            self._weights_are_whole = True

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        with self._parking.at_hand("params"):
            self._gather_updates()
            yield

    def optimizer_zero_grad(self) -> None:
        with self._parking.at_hand("grads"):
            self._gradients.zero()
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def grad_norm(self) -> float:
        self.check_at_hand("grads")
        self._gradients.reduce()
        self.optimizer.prepare_grads()
        return grad_norm(optimizer_parts(self.optimizer), self.device)

    def apply_gradient(self, norm: float) -> None:
        assert self.optimizer_config is not None
        self.check_at_hand("params", "grads", "optimizer")
        self._weights_are_whole = not self.config.overlap_param_gather
        apply_gradient(self.optimizer, self.optimizer_config, norm, learning_rate(self.optimizer_config, self.step))
        require_param_gather(self.chunks)

    def find_nonfinite(self) -> list[str]:
        own = [
            global_name(chunk, name)
            for chunk in map(unwrapped, self.chunks)
            for name, param in chunk.named_parameters()
            if not bool(torch.isfinite(param.main_grad).all())  # type: ignore[attr-defined]
        ]
        of_ranks = gather(own[:3], self.groups.control)
        return [f"rank {rank}: {name}" for rank, names in enumerate(of_ranks) for name in names][:3]

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        super().reset_optimizer(optimizer)
        with self._parking.at_hand("optimizer"):
            reset_state(self.optimizer, optimizer)
        self.optimizer_config = optimizer
        self.step = self.skipped_steps = 0

    def get_per_tensor_param(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        with self._whole_weights():
            yield from self.weights.full_tensors(getattr(torch, dtype or self.config.param_dtype))

    def get_per_tensor_shards(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
        with self._whole_weights():
            for name, shard in self.weights.shards(None if dtype is None else getattr(torch, dtype)):
                yield name, replace(shard, tensor=shard.tensor.clone()) if self.streams_weights else shard

    @property
    def streams_weights(self) -> bool:
        return self._parking.get("params") is not None

    def save_checkpoint(self, path: str | Path) -> None:
        self._saver.finish()
        progress = Progress(
            step=self.step,
            skipped_steps=self.skipped_steps,
            world_size=dist.get_world_size(),
            has_optimizer=self._optimizer is not None,
        )
        settings, group = self.checkpoint_config, self.groups.checkpoint
        with self._whole_weights(), self._parking.at_hand("optimizer"):
            model = (self.chunks, self._optimizer, self.architecture.vocab_size, self.device)
            content = checkpoint.collect(*model, copied=settings.asynchronous)
            self._saver.run(
                lambda: checkpoint.save(Path(path), content, progress, group, keep_last=settings.keep_last),
                asynchronous=settings.asynchronous,
            )

    def finish_checkpoint(self) -> None:
        self._saver.finish()

    def load_checkpoint(self, path: str | Path) -> None:
        self._saver.finish()
        progress = read_progress(Path(path), self.groups.control, with_optimizer=self._optimizer is not None)
        with self._whole_weights(), self._parking.at_hand("optimizer"):
            model = (self.chunks, self._optimizer, self.architecture.vocab_size, self.device)
            checkpoint.load(Path(path), *model, progress, self.groups.control)
        self.step, self.skipped_steps = progress.step, progress.skipped_steps
        self.optimizer_zero_grad()

    def save_hf(
        self, path: str | Path, dtype: Dtype | None = None, *, max_shard_size: int | str = MAX_SHARD_SIZE
    ) -> None:
        target, max_shard_bytes, group = Path(path), shard_bytes(max_shard_size), self.groups.control
        saved_as: Dtype = self.config.param_dtype if dtype is None else dtype
        start_export(target, self.export_config(), saved_as, Path(self.model_config.path), group)
        sizes_bytes = self.weights.sizes_bytes(getattr(torch, saved_as))
        write_weights(self.get_per_tensor_param(saved_as), sizes_bytes, target, group, max_shard_bytes=max_shard_bytes)

    def export_config(self) -> PretrainedConfig:
        """The configuration of the model, for `save_hf`."""
        config = AutoConfig.from_pretrained(self.model_config.path)
        if self.architecture.num_nextn_predict_layers:
            config.update({"num_nextn_predict_layers": 0})
        return config

    def performance(self) -> dict[str, float]:
        if self._counted is None:
            with torch.device("meta"):
                self._counted = self.counted_model.from_config(self.export_config())
        return self.meter.report(
            self._counted,
            dtype=self.config.param_dtype,
            peak_tflops=self.config.peak_tflops,
            ranks_per_row=self.config.ranks_per_row,
            group=self.groups.control,
        )

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
