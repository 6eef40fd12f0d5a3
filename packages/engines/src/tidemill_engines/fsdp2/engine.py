"""The FSDP2 engine without its step: life cycle, optimizer, weights and checkpoints."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from tidemill_engines.base.engine import BaseEngine
from tidemill_engines.base.lifecycle import initialized
from tidemill_engines.checkpoint.folder import Progress
from tidemill_engines.config import CheckpointConfig, Dtype, ModelConfig, OptimizerConfig
from tidemill_engines.distributed.agreement import check_same, raise_on_all_ranks
from tidemill_engines.fsdp2 import checkpoint, lora
from tidemill_engines.fsdp2.config import FSDP2Config
from tidemill_engines.fsdp2.groups import FSDP2Groups, close_groups, make_groups
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
from tidemill_engines.hf_weights.export import write_weights
from tidemill_engines.hf_weights.layout import Layout, checkpoint_shapes, plan_layout, stored_bytes
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles
from tidemill_engines.hf_weights.shard import WeightShard
from tidemill_engines.location import absolute, written_to
from tidemill_engines.offload import OffloadableTensors, like, local_part
from tidemill_engines.optimizer import (
    INCOMPLETE_GRADIENTS,
    build_adamw,
    clip_grads,
    global_grad_norm,
    learning_rate,
    local_grads,
    nonfinite_params,
    set_learning_rate,
)


class FSDP2Engine(BaseEngine[FSDP2Config]):
    """A Hugging Face model under torch's `fully_shard`; subclasses implement the step of a type of model.

    Weights, gradients and optimizer state are sharded over the ranks. Outside of `train_batch` and `infer_batch` the
    weights are always sharded.

    Attributes:
        new_weights: names of the model's weights that a checkpoint may lack; they start at zero.
        unused_weights: names of the checkpoint's weights that the model does not use.
    """

    config_class = FSDP2Config
    new_weights: tuple[str, ...] = ()
    unused_weights: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: FSDP2Config,
        optimizer: OptimizerConfig | None,
        checkpoint: CheckpointConfig,
    ) -> None:
        super().__init__(model=model, engine=engine, optimizer=optimizer, checkpoint=checkpoint)
        self._optimizer: torch.optim.AdamW | None = None
        self._model: PreTrainedModel | None = None
        self._groups: FSDP2Groups | None = None
        self._layout: Layout = {}
        self._adapter_is_disabled = self._has_failed = False

    def _is_open(self) -> bool:
        return self._groups is not None

    def _open(self) -> None:
        self._groups = make_groups(self.engine_config, self.device)
        self._load_model()
        with raise_on_all_ranks(self.groups.control):
            if self.optimizer_config is not None:
                self._optimizer = build_adamw(self.model.named_parameters(), self.optimizer_config)
            else:
                self.model.requires_grad_(False)

    def _load_model(self) -> None:
        """Create the model on the meta device, shard it, and read or draw this rank's part of the weights."""
        seed = self.model_config.init_seed
        with ExitStack() as opened:
            with raise_on_all_ranks(self.groups.control):
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
            with raise_on_all_ranks(self.groups.control):
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
        """Create the model on the meta device."""
        return build_model(self.model_config)

    def _release(self) -> None:
        groups, self._groups = self._groups, None
        self._optimizer = None
        self._model = None
        if groups is not None:
            close_groups(groups)

    @property
    def model(self) -> PreTrainedModel:
        """The sharded model; RuntimeError before `initialize` and after `close`."""
        return initialized(self._model)

    @property
    def groups(self) -> FSDP2Groups:
        """Process groups of the engine; RuntimeError before `initialize` and after `close`."""
        return initialized(self._groups)

    @property
    def optimizer(self) -> torch.optim.AdamW:
        """The optimizer; RuntimeError for an engine without one, or before `initialize`."""
        if self._optimizer is None:
            raise RuntimeError("this engine has no optimizer; create it with an OptimizerConfig and initialize() it")
        return self._optimizer

    def is_mp_src_rank_with_outputs(self) -> bool:
        group = self.groups.sequence_parallel
        return group is None or dist.get_rank(group) == 0

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        if self.model_config.lora is None:
            raise ValueError("the engine trains no adapter; set ModelConfig.lora, or create a second engine")
        model, before = self.model, self._adapter_is_disabled
        self._adapter_is_disabled = True
        lora.set_adapters_disabled(model, True)
        try:
            yield
        finally:
            self._adapter_is_disabled = before
            lora.set_adapters_disabled(model, before)

    def check_trains(self) -> None:
        super().check_trains()
        if self._adapter_is_disabled:
            raise RuntimeError(
                "expected a step with adapters, got one within disable_adapter(); leave the context first"
            )

    def _modules(self) -> list[torch.nn.Module]:
        return [self.model]

    def _offloadable(self) -> Mapping[str, OffloadableTensors]:
        return {
            "params": OffloadableTensors(lambda: self.model.parameters()),
            "grads": OffloadableTensors(lambda: (p.grad for p in self.model.parameters() if p.grad is not None)),
            "optimizer": OffloadableTensors(self._optimizer_tensors),
        }

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                yield from (value for value in state.values() if value.dim() > 0)

    def optimizer_zero_grad(self) -> None:
        self._has_failed = False
        for param in self.model.parameters():
            param.grad = None
        if (grads := self._offloader.get("grads")) is not None:
            grads.discard()

    def check_gradients(self) -> None:
        """Raise RuntimeError if a backward has failed since `optimizer_zero_grad`."""
        if self._has_failed:
            raise RuntimeError(INCOMPLETE_GRADIENTS)

    def grad_norm(self) -> float:
        self.check_onloaded("grads")
        self.check_gradients()
        grads = local_grads(self.model.parameters())
        return global_grad_norm(grads, self.groups.control, self.groups.num_replicas)

    def apply_gradient(self, norm: float) -> None:
        assert self.optimizer_config is not None
        self.check_onloaded("params", "grads", "optimizer")
        clip_grads(local_grads(self.model.parameters()), norm, self.optimizer_config.clip_grad)
        set_learning_rate(self.optimizer, learning_rate(self.optimizer_config, self.step))
        self.optimizer.step()

    def _nonfinite_params(self) -> list[str]:
        return nonfinite_params(self.model.named_parameters())

    def _new_optimizer(self, optimizer: OptimizerConfig) -> None:
        with self._offloader.onloaded("params"):
            self._optimizer = build_adamw(self.model.named_parameters(), optimizer)
        if (state := self._offloader.get("optimizer")) is not None:
            state.replace()

    def _counted_model(self) -> PreTrainedModel:
        return self.model

    def get_per_tensor_param(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._merged_weights(dtype):
            yield from checkpoint_tensors(name, weight, self._layout)

    def get_per_tensor_shards(self) -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
        for name, weight in self._merged_weights(None):
            yield from checkpoint_shards(name, weight, self._layout)

    @property
    def streams_weights(self) -> bool:
        return (
            self.model_config.lora is not None
            or self._offloader.get("params") is not None
            or self.engine_config.offload_policy
        )

    def _merged_weights(self, dtype: Dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights by their names in the model, on the engine's device, with adapters merged."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, weight in lora.merged_weights(self.model, self._readable):
            if dtype is not None and name in parameters:  # buffers, such as biases of routers, keep their dtype
                yield name, weight.to(getattr(torch, dtype))
            else:
                yield name, weight

    def get_adapter_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = dict(self.model.named_parameters())
        for name, peft_name in lora.peft_names(self.model):
            yield peft_name, self._readable(weights[name])

    def _readable(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight on the engine's device: itself, or a copy if it is offloaded."""
        weight = weight.detach()
        if (params := self._offloader.get("params")) is not None:
            weight = params.read(weight)
        return weight if weight.device == self.device else like(weight, local_part(weight).to(self.device))

    def save_adapter(self, path: str | Path) -> None:
        settings = self.model_config.lora
        if settings is None:
            raise ValueError("the engine trains no adapter; set ModelConfig.lora, or save all weights with save_hf()")
        if self.new_weights:
            raise ValueError(
                f"an adapter does not contain {', '.join(self.new_weights)}; save all weights with save_hf()"
            )
        target = absolute(path)
        with raise_on_all_ranks(self.groups.control):
            if dist.get_rank() == 0:
                config = lora.peft_config(settings, included=lora.adapted_modules(self.model))
                config.base_model_name_or_path = self.model_config.path
                with written_to(target) as folder:
                    config.save_pretrained(str(folder))
        sizes_bytes = stored_bytes(self.get_adapter_param(), {}, None)
        write_weights(self.get_adapter_param(), sizes_bytes, target, self.groups.control, file_stem="adapter_model")

    def export_config(self) -> PretrainedConfig:
        return type(self.model.config).from_dict(self.model.config.to_dict())

    def _exported_bytes(self, dtype: Dtype | None) -> list[tuple[str, int]]:
        return stored_bytes(lora.base_weights(self.model), self._layout, dtype)

    def _collect_state(self, *, copied: bool) -> dict[str, torch.Tensor]:
        tensors = self._state_tensors() | self._rng_tensors()
        return checkpoint.snapshot(tensors) if copied else tensors

    def _write_state(
        self, path: str, state: dict[str, torch.Tensor], progress: Progress, group: dist.ProcessGroup
    ) -> None:
        checkpoint.save(path, state, progress, group, keep_last=self.checkpoint_config.keep_last)

    def _load_state(self, path: Path, progress: Progress) -> None:
        rng = self._rng_tensors() if progress.world_size == dist.get_world_size() else {}
        rng = checkpoint.load(path, self._state_tensors(), self.groups.control, if_saved=rng)
        if rng:
            checkpoint.set_rng_state({name.rsplit(".", 1)[1]: state for name, state in rng.items()}, self.device)

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint by name; loading writes into them."""
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
