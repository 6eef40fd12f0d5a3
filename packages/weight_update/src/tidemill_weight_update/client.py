"""The interface between the updater and an engine, and the link to engines on other machines."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from tidemill_weight_update.control.descriptor import Request
from tidemill_weight_update.lora import LoraConfig
from tidemill_weight_update.memory import BucketHandle

PauseMode = Literal["abort", "retract", "in_place"]
"""Pause modes of SGLang. "abort" ends running requests, "retract" recomputes them after the pause, "in_place" continues
them with their old KV cache.
"""


class EngineClient(Protocol):
    """An engine as the updater sees it. Its `repr` names the engine in error messages.

    Every method raises on failure (any exception type) and returns within its own timeout.
    """

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks of the engine."""
        ...

    @property
    def has_loader(self) -> bool:
        """Whether the engine has a `Receiver` in each rank; SGLang: was launched with `sglang_launch_args()`."""
        ...

    def load(self, request: Request, *, flush_cache: bool) -> None:
        """Pass `request` to `Receiver.handle` on all ranks of the engine (SGLang: to the tidemill loader).

        Return when all ranks have processed it, successfully or not: they report to the trainer themselves. With
        `flush_cache`, empty the prefix cache before the engine accepts the next request.
        """

    def load_bucket(self, bucket: BucketHandle) -> None:
        """Load all tensors of `bucket` on all ranks of the engine.

        After the return no rank reads host memory of the bucket. GPU memory may still be read by copies that are queued
        on the device: each call waits, on every rank, for the copies of the previous call.
        """

    def flush_cache(self) -> None:
        """Empty the prefix cache. Raise if the engine could not, for example because requests are running."""

    def pause(self, mode: PauseMode) -> None:
        """Stop generation; new requests wait."""

    def resume(self) -> None:
        """End a pause, if there is one. Also called after a `pause` that raised."""

    def set_weight_version(self, version: str) -> None:
        """Make the engine report `version` with its outputs."""

    def get_weight_version(self) -> str:
        """Return the version that the engine reports with its outputs."""
        ...


@runtime_checkable
class HoldingClient(Protocol):
    """An `EngineClient` whose engine could start a request between the end of `load` and the following calls.

    With `in_flight="wait"`, the updater calls `load(flush_cache=False)`, then `hold` while the load runs, then
    `flush_cache` and finally `resume`.
    """

    def hold(self) -> None:
        """Make requests that wait for the end of `load` wait for `resume` instead.

        Called from another thread while `load` runs, after all ranks have started it: requests that `load` waits for
        have finished. No rank finishes its load before this method returns.
        """


@runtime_checkable
class AdapterClient(Protocol):
    """What `WeightUpdater.update_adapter` requires in addition to `EngineClient`."""

    def adapters(self) -> Collection[str]:
        """Return the names of the adapters that requests can select."""
        ...

    def load_adapter(self, name: str, config: LoraConfig, bucket: BucketHandle) -> None:
        """Load the tensors of `bucket` as the adapter `name`, which must not be loaded yet.

        The engine may keep a reference to the bucket's memory: the updater does not write to it again.
        """

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for `name`, wait for the running ones, then remove the adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLink:
    """Connects engines on other machines: `WeightUpdater(engines, link=GroupLink(host="10.0.0.1"))`.

    Control messages go through a store that trainer rank 0 opens on `host`, packed buckets over NCCL between GPUs and
    gloo between CPUs. Engines on the machine of a trainer rank still read its arena directly. Nothing is encrypted or
    signed, so use a link inside a trusted network only.

    Attributes:
        host: address of trainer rank 0's machine that engines and other trainer ranks can reach. The package listens on
            no other address of that machine; on other machines it listens on the address from which `host` is reached.
        port: port of the store; 0 selects a free one. Buckets use further ports, selected by the system.
    """

    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or self.host in ("", "*", "0.0.0.0", "::"):
            raise ValueError(
                f"host must be the single address that engines connect to, such as '10.0.0.1', got {self.host!r}"
            )
        if not isinstance(self.port, int) or not 0 <= self.port < 1 << 16:  # the store would use its last 16 bits
            raise ValueError(f"port must be an int from 0 to 65535, got {self.port!r}")
