"""Engines that failed, and are left out until they have been brought up to date."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tidemill_weight_update.client import EngineClient, PausingClient
from tidemill_weight_update.send.fleet import Fleet, Member

Operation = Literal["update", "update_adapter"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Around an engine that is behind in an operation. One that may hold a mix of versions is stopped, if it can be."""

    client: EngineClient
    behind: Operation
    mixed: bool = False
    stopped: bool = False


class Quarantine:
    """Which engines are behind in what, since they failed or were left out. A entry falls when its engine catches up.

    Adapters belong to weights: an engine that is behind in `update` gets no adapter. One that lacks an adapter only
    still gets weights.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def is_behind(self, engine: EngineClient, operation: Operation) -> bool:
        """Whether the engine is behind in `operation`."""
        return any(engine is entry.client and operation == entry.behind for entry in self._entries)

    def restore(self, member: Member) -> None:
        """Notes what an earlier `update`, of this or another updater, has left of the member's engine, until this one
        succeeds."""
        for entry in self._entries:
            if entry.client is member.client and entry.behind == "update":
                member.paused = True
                member.unchanged, member.stopped = not entry.mixed, entry.stopped
                return
        if isinstance(member.client, PausingClient) and member.client.paused == "abort":
            member.paused = member.stopped = True
            member.unchanged = False

    def eligible(self, engines: Sequence[EngineClient], operation: Operation) -> list[EngineClient]:
        """Those that `operation` does not leave out; all if it would leave out all."""
        eligible = [
            engine
            for engine in engines
            if not self.is_behind(engine, "update") and not self.is_behind(engine, operation)
        ]
        return eligible if eligible else list(engines)

    def record_outcome(self, fleet: Fleet, operation: Operation) -> None:
        """Quarantine the engines that failed in `operation`, and lifts the fences of those that did not.

        An engine that holds what it held before is quarantined only if it was already, or if others went on to the new
        version. One that was left out because it is behind in `update` is then behind in the adapter, too.
        """
        took_part = {id(member.client) for member in fleet.members}
        others = any(member.error is None for member in fleet.members)
        late = [
            _Entry(member.client, operation, not member.unchanged, member.stopped)
            for member in fleet.members
            if member.error is not None and (others or not member.unchanged or self.is_behind(member.client, operation))
        ]
        closed = [entry for entry in self._entries if entry.behind != operation or id(entry.client) not in took_part]
        if others and operation == "update_adapter":
            behind = {id(entry.client) for entry in closed if entry.behind == operation}
            late += [_Entry(entry.client, operation) for entry in closed if id(entry.client) not in took_part | behind]
        self._entries = closed + late


def distinct(engines: Sequence[EngineClient]) -> list[EngineClient]:
    """The engines; raises ValueError if one comes twice, TypeError if they are no list or tuple of clients."""
    if not isinstance(engines, Sequence):
        raise TypeError(f"engines must be a list of engine clients, got {engines!r}")
    for index, engine in enumerate(engines):
        if "has_loader" not in dir(engine):  # which asking for it would ask a server
            raise TypeError(
                f"engine {index} of {len(engines)} is no engine client but {engine!r}; pass LocalEngine(engine), "
                f"HttpEngine(url), or an object with the members of EngineClient"
            )
        if any(engine is other for other in engines[:index]):
            raise ValueError(
                f"each engine may be given once, engine {index} of {len(engines)} ({engine!r}) came before"
            )
    return list(engines)
