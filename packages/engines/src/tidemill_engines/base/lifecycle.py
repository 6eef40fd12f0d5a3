"""The life cycle of an engine: process groups, train and eval mode, offloading."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from tidemill_engines.checkpoint.saver import Saver
from tidemill_engines.config import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from tidemill_engines.distributed.device import limit_threads, resolve_device
from tidemill_engines.offload import OffloadableTensors, Offloader
from tidemill_engines.throughput import Meter

ConfigT = TypeVar("ConfigT", bound=EngineConfig)
T = TypeVar("T")


class Groups(Protocol):
    """Process groups that every engine has. All of them are gloo groups for plain data.

    Attributes:
        control: group of all ranks.
        checkpoint: group of all ranks, for checkpoints that another thread saves.
        data_parallel: group of the ranks that work on different rows.
    """

    @property
    def control(self) -> dist.ProcessGroup: ...
    @property
    def checkpoint(self) -> dist.ProcessGroup: ...
    @property
    def data_parallel(self) -> dist.ProcessGroup: ...


class EngineLifecycle(ABC, Generic[ConfigT]):
    """The part of `BaseEngine` that creates, switches and frees the model."""

    config_class: ClassVar[type[EngineConfig]] = EngineConfig

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: ConfigT,
        optimizer: OptimizerConfig | None,
        checkpoint: CheckpointConfig,
    ) -> None:
        if not isinstance(engine, self.config_class):
            required, received = self.config_class.__name__, type(engine).__name__
            raise TypeError(f"engine of {type(self).__name__} must be of type {required}, got {received}")
        self.model_config = model
        self.engine_config: ConfigT = engine
        self.optimizer_config = optimizer
        self.checkpoint_config = checkpoint
        self.device = torch.device("meta")
        self.step = 0
        self.skipped_steps = 0
        self.meter = Meter()
        self._offloader = Offloader({})
        self._saver = Saver()

    def initialize(self) -> None:
        """Join or create the process groups, load the model and create the optimizer. Collective.

        Raises:
            RuntimeError: the engine is initialized already.
        """
        if self._is_open():
            raise RuntimeError("the engine is initialized already; call close() first")
        self.device = self.meter.device = resolve_device(self.engine_config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not getattr(self.engine_config, "offload_policy", False):  # with it, the optimizer computes on the CPU
            limit_threads(self.device)
        try:
            self._open()
            for module in self._modules():
                module.eval()
            config = self.engine_config
            kinds = {
                "params": config.param_offload,
                "grads": config.grad_offload,
                "optimizer": config.optimizer_offload,
            }
            self._offloader = Offloader(
                {kind: part for kind, part in self._offloadable().items() if kinds[kind]},
                measure=lambda: self.meter.part("offload"),
            )
        except BaseException:
            self.close()
            raise
        self.step = self.skipped_steps = 0

    def close(self) -> None:
        """Free the model and the optimizer and destroy the process groups of the engine. May be called again."""
        try:
            self._saver.close()
        finally:
            self._offloader = Offloader({})
            self._release()

    @abstractmethod
    def _is_open(self) -> bool:
        """Return whether the engine holds process groups."""

    @abstractmethod
    def _open(self) -> None:
        """Create process groups, model, weights and optimizer. `close` is called after an error."""

    @abstractmethod
    def _release(self) -> None:
        """Free what `_open` has created, also if it failed half-way."""

    @property
    @abstractmethod
    def groups(self) -> Groups:
        """Process groups of the engine; RuntimeError before `initialize` and after `close`."""

    def get_data_parallel_rank(self) -> int:
        """Return which part of the global batch this rank works on."""
        return dist.get_rank(self.groups.data_parallel)

    def get_data_parallel_size(self) -> int:
        """Return the number of parts of the global batch."""
        return dist.get_world_size(self.groups.data_parallel)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the gloo group of the ranks that work on different parts of the batch."""
        return self.groups.data_parallel

    @abstractmethod
    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether the outputs of this rank are collected for its data-parallel part."""

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Enable dropout and gradients, and keep parameters and gradients on the device.

        Gradients are recorded even within `torch.no_grad()`, `torch.inference_mode()` or `eval_mode()`. The exit
        restores the previous mode and offloads what the context onloaded.
        """
        with self._mode(training=True), self._offloader.onloaded("params", "grads"):
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Disable dropout and gradients, and keep the parameters on the device; the exit is that of `train_mode`."""
        with self._mode(training=False), self._weights_onloaded():
            yield

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        modules = self._modules()
        was_training = modules[0].training
        for module in modules:
            module.train(training)
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(training):
                yield
        finally:
            for module in modules:
                module.train(was_training)

    @contextmanager
    def _weights_onloaded(self) -> Iterator[None]:
        """Keep complete weights on the device within the context."""
        with self._offloader.onloaded("params"):
            yield

    def offloaded_later(self, *kinds: str) -> AbstractContextManager[None]:
        """Return a context within which "params", "grads" or "optimizer" stay on the device once they were onloaded.

        Its end offloads them, so that they are on the device between steps, and between a step and what reads weights.
        On a GPU, `train_batch` copies the optimizer state back beside the forward pass.
        """
        return self._offloader.offloaded_later(*kinds)

    def check_onloaded(self, *kinds: str) -> None:
        """Raise RuntimeError if one of "params", "grads" or "optimizer" is offloaded."""
        self._offloader.check_onloaded(*kinds)

    @abstractmethod
    def _modules(self) -> list[torch.nn.Module]:
        """Return the modules of the model on this rank, at least one; RuntimeError before `initialize`."""

    @abstractmethod
    def _offloadable(self) -> Mapping[str, OffloadableTensors]:
        """Return the tensors that can be offloaded: "params", "grads" and "optimizer"."""


def initialized(part: T | None) -> T:
    """Return `part`, or raise RuntimeError if it is None because the engine is not initialized."""
    if part is None:
        raise RuntimeError("the engine is not initialized; call initialize() first")
    return part
