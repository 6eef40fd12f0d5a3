"""Engines that failed, and are left out until they have been brought up to date."""

from collections.abc import Sequence
from typing import Literal

from tidemill_weight_update.client import EngineClient
from tidemill_weight_update.send.fleet import Fleet

Operation = Literal["update", "update_adapter"]


class Fences:
    """Which engines are behind in what, since they failed or were left out. A fence falls when its engine catches up.

    Adapters belong to weights: an engine that is behind in `update` gets no adapter. One that lacks an adapter only
    still gets weights.
    """

    def __init__(self) -> None:
        self._closed: list[tuple[EngineClient, Operation]] = []

    def are_around(self, engine: EngineClient, operation: Operation) -> bool:
        """Whether the engine is behind in `operation`."""
        return any(engine is client and operation == behind for client, behind in self._closed)

    def without(self, engines: Sequence[EngineClient], operation: Operation) -> list[EngineClient]:
        """Those that `operation` does not leave out; all if it would leave out all."""
        open_ones = [
            engine
            for engine in engines
            if not self.are_around(engine, "update") and not self.are_around(engine, operation)
        ]
        return open_ones if open_ones else list(engines)

    def settle(self, fleet: Fleet, operation: Operation) -> None:
        """Fences the engines that failed in `operation`, and lifts the fences of those that did not.

        An engine that holds what it held before is fenced only if others went on to the new version. One that was left
        out because it is behind in `update` is then behind in the adapter, too.
        """
        clients = [member.client for member in fleet.members]
        before = self._closed
        self._closed = [
            (client, behind)
            for client, behind in before
            if behind != operation or not any(client is other for other in clients)
        ]
        others = any(member.error is None for member in fleet.members)
        late = [
            member.client for member in fleet.members if member.error is not None and (others or not member.unchanged)
        ]
        if others and operation == "update_adapter":
            late += [client for client, _ in before if not any(client is other for other in clients)]
        for client in late:
            if not self.are_around(client, operation):
                self._closed.append((client, operation))


def distinct(engines: Sequence[EngineClient]) -> list[EngineClient]:
    """The engines; raises ValueError if one comes twice."""
    for index, engine in enumerate(engines):
        if any(engine is other for other in engines[:index]):
            raise ValueError(
                f"each engine may be given once, engine {index} of {len(engines)} ({engine!r}) came before"
            )
    return list(engines)
