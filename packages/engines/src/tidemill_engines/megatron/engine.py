"""The Megatron engine without its step: life cycle, optimizer, weights and checkpoints."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tidemill_engines.base.engine import BaseEngine
from tidemill_engines.base.lifecycle import initialized
from tidemill_engines.checkpoint.folder import Progress
from tidemill_engines.config import CheckpointConfig, Dtype, ModelConfig, OptimizerConfig
from tidemill_engines.distributed.agreement import check_same, raise_on_all_ranks
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
from tidemill_engines.offload import OffloadableTensors
from tidemill_engines.optimizer import learning_rate


class MegatronEngine(BaseEngine[MegatronConfig]):
    """A Hugging Face model in Megatron's modules; subclasses implement the step of a type of model.

    Megatron keeps its process groups in module globals, so the engines of a process must have the same layout.

    Attributes:
        new_weights: names of the model's weights that a checkpoint may lack; they start at zero.
        unused_weights: names of the checkpoint's weights that the model does not use.
        counted_model: transformers' class of the same model, for `performance`.
    """

    config_class = MegatronConfig
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
        super().__init__(model=model, engine=engine, optimizer=optimizer, checkpoint=checkpoint)
        check_settings(model, optimizer)
        self.division = Division()
        self.chunks: list[DistributedDataParallel] = []
        self._patches = ExitStack()
        self._architecture: Architecture | None = None
        self._groups: MegatronGroups | None = None
        self._weights: MegatronWeights | None = None
        self._optimizer: MegatronOptimizer | None = None
        self._hf_model: PreTrainedModel | None = None
        self._gradients = Gradients([], overlap=False)
        self._weights_are_complete = True  # False until the updates of other ranks are all-gathered

    def _is_open(self) -> bool:
        return self._groups is not None

    def _open(self) -> None:
        config = self.engine_config
        self._patches.enter_context(apply_patches(self.device))
        self._groups = make_groups(config, self.device, self._read, seed=config.seed, timeout_s=config.timeout_s)
        check_same(self.architecture, f"config.json in {self.model_config.path}", self.groups.control)
        self._build()
        self._weights_are_complete = True

    def _read(self, world_size: int) -> None:
        self._architecture = self.read_architecture()
        self.engine_config.check_architecture(self._architecture, world_size)
        check_moe(self.model_config, self.engine_config, self._architecture, self.device)

    def read_architecture(self) -> Architecture:
        """Return the architecture of the model at `ModelConfig.path`."""
        return Architecture.read(Path(self.model_config.path))

    def adapt(self, model: HiddenStatesModel) -> None:
        """Change a new chunk of the model into the one that this engine trains."""

    def _build(self) -> None:
        parallel = self.engine_config
        dtype = getattr(torch, parallel.param_dtype)
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
            fused=parallel.fuse_elementwise and self.device.type == "cuda",
            recompute=parallel.recomputed(self.model_config),
        )
        models = build_chunks(self.architecture, config)
        for model in models:
            self.adapt(model)
            model.to(self.device).requires_grad_(self.optimizer_config is not None)
        group = initialized(dist.group.WORLD)  # also supports CUDA tensors
        self._weights = MegatronWeights(models, self.architecture, own_placement(), group)
        self._fill_weights()
        self.chunks = wrap_chunks(models, config, parallel, is_trained=self.optimizer_config is not None)
        self._gradients = Gradients(self.chunks, overlap=parallel.overlap_grad_reduce)
        if self.optimizer_config is not None:
            self._optimizer = build_optimizer(
                self.chunks,
                self.optimizer_config,
                dtype=dtype,
                distributed=parallel.use_distributed_optimizer,
                overlap_param_gather=parallel.overlap_param_gather,
            )

    def _fill_weights(self) -> None:
        model = self.model_config
        if model.init_seed is not None:
            self.weights.draw(model.init_seed, self.architecture.initializer_range, zero=self.new_weights)
            return
        with raise_on_all_ranks(self.groups.control), SafetensorsFiles(Path(model.path)) as files:
            self.weights.load(files, new=self.new_weights, unused=self.unused_weights)

    def _release(self) -> None:
        groups, self._groups = self._groups, None
        self._architecture = self._weights = self._optimizer = None
        release_activations(self.chunks)
        self.chunks = []
        self._gradients = Gradients([], overlap=False)
        try:
            if groups is not None:
                close_groups(groups)
        finally:
            self._patches.close()
        del groups
        gc.collect()  # Megatron's modules reference groups in cycles; gloo's threads exit with the last reference

    @property
    def groups(self) -> MegatronGroups:
        """Process groups of the engine; RuntimeError before `initialize` and after `close`."""
        return initialized(self._groups)

    @property
    def architecture(self) -> Architecture:
        """Architecture of the model; RuntimeError before `initialize` and after `close`."""
        return initialized(self._architecture)

    @property
    def weights(self) -> MegatronWeights:
        """Weights of this rank; RuntimeError before `initialize` and after `close`."""
        return initialized(self._weights)

    @property
    def optimizer(self) -> MegatronOptimizer:
        """The optimizer; RuntimeError for an engine without one, or before `initialize`."""
        if self._optimizer is None:
            raise RuntimeError("this engine has no optimizer; create it with an OptimizerConfig and initialize() it")
        return self._optimizer

    def is_mp_src_rank_with_outputs(self) -> bool:
        return is_last_stage() and dist.get_rank(self.groups.tp) == 0 and dist.get_rank(self.groups.cp) == 0

    def head(self) -> tuple[torch.Tensor, int]:
        """On the last stage, return this rank's rows of the head, without padding, and the token of the first row."""
        chunk = self.chunks[-1]
        model: Any = unwrapped(chunk)
        is_tied = self.architecture.tie_word_embeddings
        weight = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
        wait_for_weight(chunk, weight)
        first = dist.get_rank(self.groups.tp) * len(weight)
        num_tokens = max(0, self.architecture.vocab_size - first)
        return weight if num_tokens >= len(weight) else weight[:num_tokens], first

    def _modules(self) -> list[torch.nn.Module]:
        initialized(self._weights)
        return list(self.chunks)

    @contextmanager
    def _weights_onloaded(self) -> Iterator[None]:
        with super()._weights_onloaded():
            if not self._weights_are_complete:
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)
                self._weights_are_complete = True
            yield

    def _offloadable(self) -> Mapping[str, OffloadableTensors]:
        return {
            "params": OffloadableTensors(self._params),
            "grads": OffloadableTensors(lambda: grad_buffers(self.chunks), are_zero=lambda: self._gradients.are_zero),
            "optimizer": OffloadableTensors(self._optimizer_tensors),
        }

    def _params(self) -> Iterator[torch.Tensor]:
        return (param for chunk in self.chunks for param in chunk.parameters())

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        return iter(()) if self._optimizer is None else own_tensors(self._optimizer, list(self._params()))

    def optimizer_zero_grad(self) -> None:
        with self._offloader.onloaded("grads"):
            self._gradients.zero()
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def grad_norm(self) -> float:
        self.check_onloaded("grads")
        self._gradients.reduce()
        self.optimizer.prepare_grads()
        return grad_norm(optimizer_parts(self.optimizer), self.device)

    def apply_gradient(self, norm: float) -> None:
        assert self.optimizer_config is not None
        self.check_onloaded("params", "grads", "optimizer")
        self._weights_are_complete = not self.engine_config.overlap_param_gather
        apply_gradient(self.optimizer, self.optimizer_config, norm, learning_rate(self.optimizer_config, self.step))
        require_param_gather(self.chunks)

    def _nonfinite_params(self) -> list[str]:
        return [
            global_name(chunk, name)
            for chunk in map(unwrapped, self.chunks)
            for name, param in chunk.named_parameters()
            if not bool(torch.isfinite(param.main_grad).all())  # type: ignore[attr-defined]
        ]

    def _new_optimizer(self, optimizer: OptimizerConfig) -> None:
        with self._offloader.onloaded("optimizer"):
            reset_state(self.optimizer, optimizer)

    def _counted_model(self) -> PreTrainedModel:
        model = self._hf_model
        if model is None:
            with torch.device("meta"):
                self._hf_model = model = self.counted_model.from_config(self.export_config())
        return model

    def get_per_tensor_param(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        with self._weights_onloaded():
            yield from self.weights.full_tensors(self._export_dtype(dtype))

    def get_per_tensor_shards(self) -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
        if not self._weights_are_complete:
            with self._weights_onloaded():
                pass
        params = self._offloader.get("params")
        yield from self.weights.shards(torch.Tensor.detach if params is None else params.read)

    @property
    def streams_weights(self) -> bool:
        return self._offloader.get("params") is not None

    def export_config(self) -> PretrainedConfig:
        config = AutoConfig.from_pretrained(self.model_config.path)
        if self.architecture.num_nextn_predict_layers:
            config.update({"num_nextn_predict_layers": 0})
        return config

    def _exported_bytes(self, dtype: Dtype | None) -> list[tuple[str, int]]:
        return self.weights.sizes_bytes(self._export_dtype(dtype))

    def _export_dtype(self, dtype: Dtype | None) -> torch.dtype:
        return getattr(torch, dtype or self.engine_config.param_dtype)

    def _collect_state(self, *, copied: bool) -> checkpoint.Content:
        return checkpoint.collect(
            self.chunks, self._optimizer, self.architecture.vocab_size, self.device, copied=copied
        )

    def _write_state(self, path: str, state: checkpoint.Content, progress: Progress, group: dist.ProcessGroup) -> None:
        checkpoint.save(path, state, progress, group, keep_last=self.checkpoint_config.keep_last)

    def _load_state(self, path: Path, progress: Progress) -> None:
        vocab_size, group = self.architecture.vocab_size, self.groups.control
        checkpoint.load(path, self.chunks, self._optimizer, vocab_size, self.device, progress, group)
