"""What the updater needs from an engine."""

from collections.abc import Collection
from typing import Literal, Protocol, runtime_checkable

from tidemill_weight_update.control.request import Request
from tidemill_weight_update.lora.config import LoraConfig
from tidemill_weight_update.memory.handle import BucketHandle

PauseMode = Literal["abort", "retract", "in_place"]
"""SGLang's modes of pausing: running requests end, are computed anew afterwards, or go on from their old cache."""


class EngineClient(Protocol):
    """An engine as the updater sees it. Its `repr` names it in error messages.

    Every method raises on failure (any exception) and returns within a deadline of its own.
    """

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks of the engine."""
        ...

    @property
    def has_loader(self) -> bool:
        """Whether the engine was launched with `sglang_launch_args()`."""
        ...

    def load(self, request: Request, *, flush_cache: bool) -> None:
        """Hands `request`, signed with the run's token, to our loader on all ranks of the engine.

        Returns once all ranks have dealt with it, whether they succeeded or not: they report by themselves. With
        `flush_cache` the prefix cache is emptied before the engine takes the next request; not by SGLang's option of
        that name, with which it ends if a request still runs.
        """
        ...

    def load_bucket(self, bucket: BucketHandle) -> None:
        """Loads all tensors of `bucket` on all ranks of the engine, and stamps `bucket.weight_version` if it is set.

        After it returns, no rank reads host memory of the bucket any more. GPU memory may still be read by copies that
        were queued on the device: each call waits, on every rank of the engine, for the copies of the call before it.
        """
        ...

    def flush_cache(self) -> None:
        """Empties the prefix cache; raises if the engine could not, for example because of running requests."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Makes the engine stop generating; requests that come wait."""
        ...

    def resume(self) -> None:
        """Ends a pause, if there is one: called also after a `pause` that raised, which may have taken effect."""
        ...

    def set_weight_version(self, version: str) -> None:
        """Makes the engine report `version` with its outputs."""
        ...

    def get_weight_version(self) -> str:
        """The version that the engine reports with its outputs."""
        ...


@runtime_checkable
class HoldingClient(Protocol):
    """An `EngineClient` whose engine could begin a request between the end of `load` and what follows it.

    With `in_flight="wait"` it gets `load(flush_cache=False)`, `hold` meanwhile, `flush_cache` and in the end `resume`.
    Others empty their cache in `load`, before the engine begins another request.
    """

    def hold(self) -> None:
        """Makes requests that wait for the end of `load` wait for `resume`.

        Called from another thread while `load` runs, once all ranks have begun it: those whose end `load` waits for
        have ended. No rank comes to its end before this returns.
        """
        ...


@runtime_checkable
class PausingClient(Protocol):
    """An `EngineClient` that remembers its own pauses, for the next updater that is given it.

    An updater leaves an engine paused, with "abort", that may hold a mix of versions. Another, made after that was
    closed, lets the engine go on when it has updated it completely, if its client remembers the pause. Before, it
    refuses it an adapter, and a partial update unless the engine is named. If the client does not remember a pause, or
    one of another mode, the engine stays paused: somebody else has paused it.
    """

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the last `pause` of this object (that of `hold` is "retract"), also if that raised; None if there
        was none, or `resume` has ended it. Nothing is asked for it."""
        ...


@runtime_checkable
class AdapterClient(Protocol):
    """What `WeightUpdater.update_adapter` needs from an engine besides."""

    def adapters(self) -> Collection[str]:
        """The names of the adapters that requests can ask for."""
        ...

    def load_adapter(self, name: str, config: LoraConfig, bucket: BucketHandle) -> None:
        """Makes the adapter whose tensors are those of `bucket` available as `name`, which must be free.

        The engine may keep the bucket's memory: nothing is written there any more.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Takes `name` from new requests, waits for those that use it, and forgets the adapter."""
        ...
