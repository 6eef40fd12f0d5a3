"""Registry of engines by model type, backend and device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill_engines.config import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig

if TYPE_CHECKING:
    from tidemill_engines.base.engine import BaseEngine

EngineFactory = Callable[[], "type[BaseEngine]"]
"""Imports and returns an engine class; called only when the engine is created."""


@dataclass(frozen=True, slots=True)
class _Entry:
    factory: EngineFactory
    extra: str | None


_entries: dict[tuple[str, str, str], _Entry] = {}


class EngineRegistry:
    """Engines by (model_type, backend, device)."""

    @staticmethod
    def register(
        model_type: str, backend: str, *, devices: Sequence[str] = ("cpu", "cuda"), extra: str | None = None
    ) -> Callable[[EngineFactory], EngineFactory]:
        """Register the decorated factory and return it unchanged.

        Args:
            devices: device types that the engine supports.
            extra: package to install if the factory's imports fail, such as "tidemill-engines[megatron]".

        Raises:
            ValueError: an engine is registered already for this model type, backend and one of the devices.
        """

        def decorate(factory: EngineFactory) -> EngineFactory:
            for device in devices:
                known = _entries.get((model_type, backend, device))
                if known is not None:
                    raise ValueError(
                        f"an engine for model_type={model_type!r}, backend={backend!r}, device={device!r} is "
                        f"registered already ({known.factory.__module__}.{known.factory.__qualname__}); "
                        "choose another name"
                    )
            _entries.update({(model_type, backend, device): _Entry(factory, extra) for device in devices})
            return factory

        return decorate

    @staticmethod
    def names() -> list[tuple[str, str, str]]:
        """Return the registered (model_type, backend, device), sorted."""
        return sorted(_entries)

    @staticmethod
    def new(
        *,
        model_type: str,
        backend: str,
        model: ModelConfig,
        engine: EngineConfig,
        optimizer: OptimizerConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
    ) -> "BaseEngine":
        """Create an engine; its `initialize()` loads the model.

        Args:
            engine: configuration of the backend: `FSDP2Config` for "fsdp2", `MegatronConfig` for "megatron".
            optimizer: optimizer configuration; None creates an engine for inference only, such as a reference policy.
            checkpoint: checkpoint configuration; None uses the defaults.

        Raises:
            ValueError: no engine is registered for this model type, backend and `engine.device`; the message lists
                the registered ones.
            TypeError: an argument is not a configuration, or `engine` is that of another backend.
            ImportError: the engine requires a package that is not installed; the message names it.
        """
        for name, config, kind in (
            ("model", model, ModelConfig),
            ("optimizer", optimizer, OptimizerConfig),
            ("checkpoint", checkpoint, CheckpointConfig),
        ):
            if not isinstance(config, kind) and (config is not None or name == "model"):
                raise TypeError(f"{name} must be of type {kind.__name__}; got {config!r}")
        if not isinstance(engine, EngineConfig):
            raise TypeError(f"engine must be the configuration of the backend, such as FSDP2Config(); got {engine!r}")
        device = engine.device
        if device == "auto":
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        entry = _entries.get((model_type, backend, device))
        if entry is None:
            known = ", ".join(f"({', '.join(map(repr, names))})" for names in EngineRegistry.names())
            raise ValueError(
                f"no engine for model_type={model_type!r}, backend={backend!r}, device={device!r}; known (model_type, "
                f"backend, device): {known}. Import the package that registers the engine, or choose one of these"
            )
        try:
            engine_class = entry.factory()
        except ModuleNotFoundError as error:
            if entry.extra is None:
                raise
            raise ImportError(
                f"the engine for model_type={model_type!r}, backend={backend!r} requires {error.name}; install it with "
                f"`pip install '{entry.extra}'`"
            ) from error
        return engine_class(
            model=model,
            engine=engine,
            optimizer=optimizer,
            checkpoint=CheckpointConfig() if checkpoint is None else checkpoint,
        )


@EngineRegistry.register("language_model", "fsdp2")
def _fsdp2_language_model() -> "type[BaseEngine]":
    from tidemill_engines.fsdp2.language_model import FSDP2LanguageModel

    return FSDP2LanguageModel


@EngineRegistry.register("value_model", "fsdp2")
def _fsdp2_value_model() -> "type[BaseEngine]":
    from tidemill_engines.fsdp2.value_model import FSDP2ValueModel

    return FSDP2ValueModel


@EngineRegistry.register("language_model", "megatron", extra="tidemill-engines[megatron]")
def _megatron_language_model() -> "type[BaseEngine]":
    from tidemill_engines.megatron.language_model import MegatronLanguageModel

    return MegatronLanguageModel


@EngineRegistry.register("value_model", "megatron", extra="tidemill-engines[megatron]")
def _megatron_value_model() -> "type[BaseEngine]":
    from tidemill_engines.megatron.value_model import MegatronValueModel

    return MegatronValueModel
