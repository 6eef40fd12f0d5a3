"""What every FSDP2 engine is, whatever its model computes: life cycle, optimizer, checkpoints and export."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from tidemill_engines.base import BaseEngine
from tidemill_engines.checkpoint.folder import Progress, read_progress
from tidemill_engines.checkpoint.saver import Saver
from tidemill_engines.config import CheckpointConfig, Dtype, EngineConfig, ModelConfig, OptimizerConfig
from tidemill_engines.distributed.agreement import check_same, gather, together
from tidemill_engines.distributed.process_groups import ProcessGroups, close_groups, make_groups, resolve_device
from tidemill_engines.fsdp2 import checkpoint, lora
from tidemill_engines.fsdp2.model import build_model, freeze, shard_model
from tidemill_engines.fsdp2.random_weights import draw_weights
from tidemill_engines.fsdp2.weights import (
    checkpoint_shards,
    checkpoint_tensors,
    load_weights,
    materialize,
    named_weights,
    tied_aliases,
)
from tidemill_engines.hf_weights.export import MAX_SHARD_SIZE, shard_bytes, start_export, write_weights
from tidemill_engines.hf_weights.layout import Layout, checkpoint_shapes, plan_layout, stored_bytes
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles
from tidemill_engines.hf_weights.shard import WeightShard
from tidemill_engines.offload import Parked, Parking, like, local_part
from tidemill_engines.optimizer import (
    build_adamw,
    clip_grads,
    global_grad_norm,
    learning_rate,
    local_grads,
    nonfinite_params,
    set_learning_rate,
)


class FSDP2Engine(BaseEngine):
    """A Hugging Face model under torch's `fully_shard`; abstract in the step, which depends on the type of model.

    Each rank works on its own rows; weights, gradients and optimizer state are sharded over the ranks. Outside of
    `train_batch` and `infer_batch` the weights are always sharded.

    Attributes:
        new_weights: names of the model that a checkpoint may lack; they start at zero.
        unused_weights: names of a checkpoint that the model has no place for.
    """

    new_weights: tuple[str, ...] = ()
    unused_weights: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: EngineConfig,
        optimizer: OptimizerConfig | None,
        checkpoint: CheckpointConfig,
    ) -> None:
        if not isinstance(engine, EngineConfig):
            raise TypeError(f"the FSDP2 engine is configured by an EngineConfig, got a {type(engine).__name__}")
        super().__init__(model=model, engine=engine, optimizer=optimizer, checkpoint=checkpoint)
        self.device = torch.device("meta")
        self._optimizer: torch.optim.AdamW | None = None
        self._model: PreTrainedModel | None = None
        self._groups: ProcessGroups | None = None
        self._layout: Layout = {}
        self._parking = Parking({})
        self._saver = Saver()

    def initialize(self) -> None:
        if self._groups is not None:
            raise RuntimeError("the engine is initialized already; close() it first")
        config = self.engine_config
        self.device = self.meter.device = resolve_device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._groups = make_groups(
            self.device,
            fsdp_size=config.fsdp_size,
            sequence_parallel_size=config.ulysses_sequence_parallel_size,
            timeout_s=config.timeout_s,
        )
        try:
            self._load_model()
            with together(self.groups.control):
                if self.optimizer_config is not None:
                    self._optimizer = build_adamw(self.model.named_parameters(), self.optimizer_config)
                else:
                    self.model.requires_grad_(False)
        except BaseException:
            self.close()
            raise
        self.step = self.skipped_steps = 0
        self.model.eval()
        self._park()

    def _park(self) -> None:
        """Sends to the CPU what the configuration wants there."""
        config = self.engine_config
        kinds = {
            "params": (config.param_offload, lambda: self.model.parameters()),
            "grads": (config.grad_offload, lambda: (p.grad for p in self.model.parameters() if p.grad is not None)),
            "optimizer": (config.optimizer_offload, self._optimizer_tensors),
        }
        self._parking = Parking({kind: Parked(tensors) for kind, (wanted, tensors) in kinds.items() if wanted})

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                yield from state.values()

    def _load_model(self) -> None:
        """Makes the model without memory, shards it, and has each rank read or draw its own part of the weights."""
        seed = self.model_config.init_seed
        with ExitStack() as opened:
            with together(self.groups.control):
                model = self.build_model()
                freeze(model, self.model_config.frozen)
                files = None
                if seed is None:
                    files = opened.enter_context(SafetensorsFiles(Path(self.model_config.path)))
                self._layout = plan_layout(
                    model,
                    dict(named_weights(model)),
                    tied_aliases(model),
                    checkpoint_shapes(model) if files is None else files.shapes,
                    absent=self.new_weights,
                    unused=self.unused_weights,
                )
                if self.model_config.lora is not None:
                    lora.add_adapters(model, self.model_config.lora, self.new_weights)
                    self._layout = lora.adapted_layout(model, self._layout)
            shapes = {name: tuple(weight.shape) for name, weight in named_weights(model)}
            check_same(shapes, f"model at {self.model_config.path}", self.groups.control)
            shard_model(model, self.groups.mesh, self.engine_config)
            with together(self.groups.control):
                param_device = torch.device("cpu") if self.engine_config.offload_policy else self.device
                materialize(model, self.device, param_device)
                if files is not None:
                    load_weights(model, self._layout, files)
                else:
                    assert seed is not None
                    draw_weights(model, seed, self.device, zero=self.new_weights)
                lora.initialize_adapters(model)
        self._model = model

    def build_model(self) -> PreTrainedModel:
        """Makes the model on the meta device; the weights of the checkpoint come later."""
        return build_model(self.model_config)

    def close(self) -> None:
        try:
            self._saver.close()
        finally:
            groups, self._groups = self._groups, None
            self._optimizer = None
            self._model = None
            self._parking = Parking({})
            if groups is not None:
                close_groups(groups)

    @property
    def model(self) -> PreTrainedModel:
        """The sharded model; RuntimeError before `initialize` and after `close`."""
        if self._model is None:
            raise RuntimeError("the engine is not initialized; call initialize() first")
        return self._model

    @property
    def groups(self) -> ProcessGroups:
        """What this engine communicates with; RuntimeError before `initialize` and after `close`."""
        if self._groups is None:
            raise RuntimeError("the engine is not initialized; call initialize() first")
        return self._groups

    @property
    def optimizer(self) -> torch.optim.AdamW:
        """RuntimeError for an engine without an optimizer, or before `initialize`."""
        if self._optimizer is None:
            raise RuntimeError("this engine has no optimizer; create it with an OptimizerConfig and initialize() it")
        return self._optimizer

    def check_at_hand(self, *kinds: str) -> None:
        """Raises RuntimeError if "params", "grads" or "optimizer" are asked for and away on the CPU."""
        self._parking.check(*kinds)

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        with self._mode(training=True), self._parking.at_hand("params", "grads", "optimizer"):
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        with self._mode(training=False), self._parking.at_hand("params"):
            yield

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        was_training = self.model.training
        self.model.train(training)
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(training):
                yield
        finally:
            self.model.train(was_training)

    def optimizer_zero_grad(self) -> None:
        for param in self.model.parameters():
            param.grad = None
        if (parked := self._parking.get("grads")) is not None:
            parked.forget()

    def grad_norm(self) -> float:
        self.check_at_hand("grads")
        grads = local_grads(self.model.parameters())
        return global_grad_norm(grads, self.groups.control, self.groups.num_replicas)

    def apply_gradient(self, norm: float) -> None:
        assert self.optimizer_config is not None
        self.check_at_hand("params", "grads", "optimizer")
        clip_grads(local_grads(self.model.parameters()), norm, self.optimizer_config.clip_grad)
        set_learning_rate(self.optimizer, learning_rate(self.optimizer_config, self.step))
        self.optimizer.step()

    def find_nonfinite(self) -> list[str]:
        of_ranks = gather(nonfinite_params(self.model.named_parameters())[:3], self.groups.control)
        return [f"rank {rank}: {name}" for rank, names in enumerate(of_ranks) for name in names][:3]

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        super().reset_optimizer(optimizer)
        with self._parking.at_hand("params"):
            self._optimizer = build_adamw(self.model.named_parameters(), optimizer)
        self.optimizer_config = optimizer
        self.step = self.skipped_steps = 0
        if (parked := self._parking.get("optimizer")) is not None:
            parked.replace()

    def get_per_tensor_param(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._merged_weights(dtype):
            yield from checkpoint_tensors(name, weight, self._layout)

    def get_per_tensor_shards(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
        for name, weight in self._merged_weights(dtype):
            yield from checkpoint_shards(name, weight, self._layout)

    @property
    def streams_weights(self) -> bool:
        return (
            self.model_config.lora is not None
            or self._parking.get("params") is not None
            or self.engine_config.offload_policy
        )

    def _merged_weights(self, dtype: Dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by their names in the model, on the engine's device, with adapters merged."""
        for name, weight in lora.merged_weights(self.model, self._readable):
            if dtype is not None and weight.is_floating_point():
                yield name, weight.to(getattr(torch, dtype))
            else:
                yield name, weight

    def get_adapter_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = dict(self.model.named_parameters())
        for name, peft_name in lora.peft_names(self.model):
            yield peft_name, self._readable(weights[name])

    def _readable(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight on the engine's device: itself, or a copy of one that is kept on the CPU."""
        weight = weight.detach()
        if (parked := self._parking.get("params")) is not None:
            weight = parked.read(weight)
        return weight if weight.device == self.device else like(weight, local_part(weight).to(self.device))

    def save_checkpoint(self, path: str | Path) -> None:
        self._saver.finish()
        progress = Progress(
            step=self.step,
            skipped_steps=self.skipped_steps,
            world_size=dist.get_world_size(),
            has_optimizer=self._optimizer is not None,
        )
        settings, group = self.checkpoint_config, self.groups.checkpoint
        with self._parking.at_hand("params", "optimizer"):
            tensors = self._state_tensors() | self._rng_tensors()
            if settings.asynchronous:
                tensors = checkpoint.snapshot(tensors)
            self._saver.run(
                lambda: checkpoint.save(Path(path), tensors, progress, group, keep_last=settings.keep_last),
                asynchronous=settings.asynchronous,
            )

    def finish_checkpoint(self) -> None:
        self._saver.finish()

    def load_checkpoint(self, path: str | Path) -> None:
        self._saver.finish()
        progress = read_progress(Path(path), self.groups.control, with_optimizer=self._optimizer is not None)
        rng = self._rng_tensors() if progress.world_size == dist.get_world_size() else {}
        with self._parking.at_hand("params", "optimizer"):
            rng = checkpoint.load(Path(path), self._state_tensors(), self.groups.control, if_saved=rng)
        if rng:
            checkpoint.set_rng_state({name.rsplit(".", 1)[1]: state for name, state in rng.items()}, self.device)
        self.step, self.skipped_steps = progress.step, progress.skipped_steps
        self.optimizer_zero_grad()

    def save_hf(
        self, path: str | Path, dtype: Dtype | None = None, *, max_shard_size: int | str = MAX_SHARD_SIZE
    ) -> None:
        target, max_shard_bytes, group = Path(path), shard_bytes(max_shard_size), self.groups.control
        saved_as: Dtype = self.model_config.dtype if dtype is None else dtype
        start_export(target, self.export_config(), saved_as, Path(self.model_config.path), group)
        sizes_bytes = stored_bytes(lora.base_weights(self.model), self._layout, dtype)
        write_weights(self.get_per_tensor_param(dtype), sizes_bytes, target, group, max_shard_bytes=max_shard_bytes)

    def save_adapter(self, path: str | Path) -> None:
        settings = self.model_config.lora
        if settings is None:
            raise ValueError("the engine trains no adapter; set ModelConfig.lora, or save all weights with save_hf()")
        if self.new_weights:
            raise ValueError(f"an adapter does not hold {', '.join(self.new_weights)}; save all weights with save_hf()")
        target = Path(path)
        with together(self.groups.control):
            target.mkdir(parents=True, exist_ok=True)
            if dist.get_rank() == 0:
                config = lora.peft_config(settings, included=lora.adapted_modules(self.model))
                config.base_model_name_or_path = self.model_config.path
                config.save_pretrained(str(target))
        sizes_bytes = stored_bytes(self.get_adapter_param(), {}, None)
        write_weights(self.get_adapter_param(), sizes_bytes, target, self.groups.control, file_stem="adapter_model")

    def performance(self) -> dict[str, float]:
        config = self.engine_config
        return self.meter.report(
            self.model,
            dtype=config.param_dtype,
            peak_tflops=config.peak_tflops,
            ranks_per_row=config.ulysses_sequence_parallel_size,
            group=self.groups.control,
        )

    def export_config(self) -> PretrainedConfig:
        """A copy of the model's configuration, for `save_hf`."""
        return type(self.model.config).from_dict(self.model.config.to_dict())

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.groups.data_parallel)

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size(self.groups.data_parallel)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.data_parallel

    def is_mp_src_rank_with_outputs(self) -> bool:
        group = self.groups.sequence_parallel
        return group is None or dist.get_rank(group) == 0

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint, by name; loading writes into them."""
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in named_weights(self.model):
            tensors[f"model.{name}"] = weight.detach()
            if self._optimizer is not None and weight in self._optimizer.state:
                for key, value in self._optimizer.state[weight].items():
                    tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def _rng_tensors(self) -> dict[str, torch.Tensor]:
        rank = dist.get_rank()
        return {f"rng.{rank}.{name}": state for name, state in checkpoint.rng_state(self.device).items()}
