"""Which engine serves which model type and backend."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidemill_engines.config import EngineConfig, ModelConfig, OptimizerConfig

if TYPE_CHECKING:
    from tidemill_engines.base import BaseEngine

EngineFactory = Callable[[], "type[BaseEngine]"]
"""Imports and returns an engine class; called only when that engine is asked for."""

_factories: dict[tuple[str, str], EngineFactory] = {}


class EngineRegistry:
    """The engines by (model_type, backend)."""

    @staticmethod
    def register(model_type: str, backend: str) -> Callable[[EngineFactory], EngineFactory]:
        """Registers the decorated factory and returns it unchanged.

        Raises:
            ValueError: there is one already for this model type and backend.
        """

        def decorate(factory: EngineFactory) -> EngineFactory:
            known = _factories.get((model_type, backend))
            if known is not None:
                raise ValueError(
                    f"an engine for model_type={model_type!r}, backend={backend!r} is registered already "
                    f"({known.__module__}.{known.__qualname__}); choose another name"
                )
            _factories[model_type, backend] = factory
            return factory

        return decorate

    @staticmethod
    def names() -> list[tuple[str, str]]:
        """The known pairs of model type and backend, sorted."""
        return sorted(_factories)

    @staticmethod
    def new(
        *,
        model_type: str,
        backend: str,
        model: ModelConfig,
        engine: EngineConfig,
        optimizer: OptimizerConfig | None = None,
    ) -> "BaseEngine":
        """Creates an engine; nothing is loaded before its `initialize()`.

        Args:
            optimizer: None makes an engine for inference only, such as a reference policy.

        Raises:
            ValueError: no engine is registered for this model type and backend; the message lists those there are.
        """
        factory = _factories.get((model_type, backend))
        if factory is None:
            known = ", ".join(f"({name!r}, {other!r})" for name, other in EngineRegistry.names())
            raise ValueError(
                f"no engine for model_type={model_type!r}, backend={backend!r}; known (model_type, backend): {known}"
            )
        return factory()(model=model, engine=engine, optimizer=optimizer)


@EngineRegistry.register("language_model", "fsdp2")
def _fsdp2_language_model() -> "type[BaseEngine]":
    from tidemill_engines.fsdp2.language_model import FSDP2LanguageModel

    return FSDP2LanguageModel
