"""Engines that failed, and are left out until they have been brought up to date."""

from collections.abc import Sequence
from typing import Literal

from tidemill_weight_update.client import EngineClient
from tidemill_weight_update.send.fleet import Fleet

Operation = Literal["update", "update_adapter"]


class Fences:
    """Which engines failed in which operation. An engine is open again when it has taken part in that one."""

    def __init__(self) -> None:
        self._closed: list[tuple[EngineClient, Operation]] = []

    def are_around(self, engine: EngineClient, operation: Operation | None = None) -> bool:
        """Whether the engine failed in `operation` (None: in any) and has not taken part since."""
        return any(engine is client and operation in (None, failed) for client, failed in self._closed)

    def without(self, engines: Sequence[EngineClient]) -> list[EngineClient]:
        """Those that did not fail; all if all did."""
        healthy = [engine for engine in engines if not self.are_around(engine)]
        return healthy if healthy else list(engines)

    def settle(self, fleet: Fleet, operation: Operation) -> None:
        """Fences the engines that failed in `operation`, and lifts the fences of those that did not.

        An engine that holds what it held before is fenced only if others went on to the new version.
        """
        clients = [member.client for member in fleet.members]
        self._closed = [
            (client, failed)
            for client, failed in self._closed
            if failed != operation or not any(client is other for other in clients)
        ]
        others = any(member.error is None for member in fleet.members)
        for member in fleet.members:
            if member.error is not None and (others or not member.unchanged):
                self._closed.append((member.client, operation))
