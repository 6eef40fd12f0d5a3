"""What every FSDP2 engine is, whatever its model computes: life cycle, optimizer, checkpoints and export."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from tidemill_engines.agreement import together
from tidemill_engines.base import BaseEngine
from tidemill_engines.config import Dtype, EngineConfig, ModelConfig, OptimizerConfig
from tidemill_engines.fsdp2 import checkpoint
from tidemill_engines.fsdp2.model import build_model, shard_model
from tidemill_engines.fsdp2.weights import (
    checkpoint_tensors,
    load_weights,
    materialize,
    named_weights,
    tied_aliases,
)
from tidemill_engines.hf_export import copy_side_files, write_weights
from tidemill_engines.optimizer import build_adamw, clip_grads, global_grad_norm, learning_rate, local_grads
from tidemill_engines.process_group import ProcessGroups, close_groups, make_groups, resolve_device
from tidemill_engines.safetensors_files import SafetensorsFiles
from tidemill_engines.weight_layout import Layout, plan_layout


class FSDP2Engine(BaseEngine):
    """A Hugging Face model under torch's `fully_shard`; abstract in the step, which depends on the type of model.

    Each rank works on its own rows; weights, gradients and optimizer state are sharded over the ranks. Outside of
    `train_batch` and `infer_batch` the weights are always sharded.
    """

    def __init__(self, *, model: ModelConfig, engine: EngineConfig, optimizer: OptimizerConfig | None) -> None:
        super().__init__(model=model, engine=engine, optimizer=optimizer)
        self.device = torch.device("meta")
        self.step = 0
        self._optimizer: torch.optim.AdamW | None = None
        self._model: PreTrainedModel | None = None
        self._groups: ProcessGroups | None = None
        self._layout: Layout = {}

    def initialize(self) -> None:
        if self._groups is not None:
            raise RuntimeError("the engine is initialized already; close() it first")
        config = self.engine_config
        self.device = resolve_device(config.device)
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
            if self.optimizer_config is not None:
                self._optimizer = build_adamw(self.model.parameters(), self.optimizer_config)
            else:
                self.model.requires_grad_(False)
        except BaseException:
            self.close()
            raise
        self.step = 0
        self.model.eval()

    def _load_model(self) -> None:
        """Makes the model without memory, shards it, and has each rank read its own part of the weights."""
        with ExitStack() as opened:
            with together(self.groups.control):
                model = build_model(self.model_config)
                files = opened.enter_context(SafetensorsFiles(Path(self.model_config.path)))
                self._layout = plan_layout(model, dict(named_weights(model)), tied_aliases(model), files.shapes)
            shard_model(model, self.groups.mesh, self.engine_config)
            with together(self.groups.control):
                materialize(model, self.device, self.device)
                load_weights(model, self._layout, files)
        self._model = model

    def close(self) -> None:
        groups, self._groups = self._groups, None
        self._optimizer = None
        self._model = None
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

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.train()
        try:
            yield
        finally:
            self.model.train(was_training)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)

    def optimizer_zero_grad(self) -> None:
        for param in self.model.parameters():
            param.grad = None

    def optimizer_step(self) -> float:
        assert self.optimizer_config is not None
        grads = local_grads(self.model.parameters())
        norm = global_grad_norm(grads, self.groups.control, self.groups.num_replicas)
        if math.isfinite(norm):
            clip_grads(grads, norm, self.optimizer_config.clip_grad)
            for param_group in self.optimizer.param_groups:
                param_group["lr"] = learning_rate(self.optimizer_config, self.step)
            self.optimizer.step()
        return norm

    def lr_scheduler_step(self) -> float:
        assert self.optimizer_config is not None
        used = learning_rate(self.optimizer_config, self.step)
        self.step += 1
        return used

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        self._optimizer = build_adamw(self.model.parameters(), optimizer)
        self.optimizer_config = optimizer
        self.step = 0

    def get_per_tensor_param(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in named_weights(self.model):
            tensor = weight.detach()
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(getattr(torch, dtype))
            yield from checkpoint_tensors(name, tensor, self._layout)

    def save_checkpoint(self, path: str | Path) -> None:
        progress = checkpoint.Progress(
            step=self.step, world_size=dist.get_world_size(), has_optimizer=self._optimizer is not None
        )
        tensors = self._state_tensors() | self._rng_tensors()
        checkpoint.save(Path(path), tensors, progress, self.groups.control)

    def load_checkpoint(self, path: str | Path) -> None:
        progress = checkpoint.read_progress(Path(path), self.groups.control)
        if self._optimizer is not None and not progress.has_optimizer:
            raise ValueError(f"{path} was saved by an engine without an optimizer, so training cannot continue from it")
        rng = self._rng_tensors() if progress.world_size == dist.get_world_size() else {}
        checkpoint.load(Path(path), self._state_tensors() | rng, self.groups.control)
        if rng:
            checkpoint.set_rng_state({name.rsplit(".", 1)[1]: state for name, state in rng.items()}, self.device)
        self.step = progress.step

    def save_hf(self, path: str | Path, dtype: Dtype | None = None) -> None:
        target = Path(path)
        with together(self.groups.control):
            target.mkdir(parents=True, exist_ok=True)
            if dist.get_rank() == 0:
                config = type(self.model.config).from_dict(self.model.config.to_dict())
                config.dtype = self.model_config.dtype if dtype is None else dtype
                config.save_pretrained(target)
                copy_side_files(Path(self.model_config.path), target)
        write_weights(lambda: self.get_per_tensor_param(dtype), target, self.groups.control)

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
