"""Engines that failed: later updates skip them until they are up to date again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tidemill_weight_update.client import EngineClient, PausingClient
from tidemill_weight_update.send.fleet import Fleet, Member

Operation = Literal["update", "update_adapter"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """An engine that is outdated in an operation. An engine that may hold a mix of versions is paused if possible."""

    client: EngineClient
    behind: Operation
    mixed: bool = False
    stopped: bool = False


class Quarantine:
    """Records which engines are outdated in which operation, because they failed or were skipped, until they catch up.

    An adapter requires its base weights: an engine that is outdated in `update` receives no adapter. An engine that
    only lacks an adapter still receives weights.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def is_behind(self, engine: EngineClient, operation: Operation) -> bool:
        """Return whether the engine is outdated in `operation`."""
        return any(engine is entry.client and operation == entry.behind for entry in self._entries)

    def restore(self, member: Member) -> None:
        """Set the member's state to what an earlier `update`, of this or another updater, left in its engine."""
        for entry in self._entries:
            if entry.client is member.client and entry.behind == "update":
                member.paused = True
                member.unchanged, member.stopped = not entry.mixed, entry.stopped
                return
        if isinstance(member.client, PausingClient) and member.client.paused == "abort":
            member.paused = member.stopped = True
            member.unchanged = False

    def eligible(self, engines: Sequence[EngineClient], operation: Operation) -> list[EngineClient]:
        """Return the engines that `operation` does not skip; all engines if it would skip every one."""
        eligible = [
            engine
            for engine in engines
            if not self.is_behind(engine, "update") and not self.is_behind(engine, operation)
        ]
        return eligible if eligible else list(engines)

    def record_outcome(self, fleet: Fleet, operation: Operation) -> None:
        """Quarantine the engines that failed in `operation`, and release those that succeeded.

        An engine that failed without any change is quarantined only if it was before, or if other engines have the new
        version now. An engine that was skipped because it is outdated in `update` is outdated in the adapter too.
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
    """Return the engines as a list.

    Raises:
        TypeError: they are not a list or tuple of engine clients.
        ValueError: an engine is listed twice.
    """
    if not isinstance(engines, Sequence):
        raise TypeError(f"engines must be a list of engine clients, got {engines!r}")
    for index, engine in enumerate(engines):
        if "has_loader" not in dir(engine):  # hasattr would call the property, which contacts a server
            raise TypeError(
                f"expected an engine client as engine {index} of {len(engines)}, got {engine!r}; pass "
                f"LocalEngine(engine), HttpEngine(url), or an object with the members of EngineClient"
            )
        if any(engine is other for other in engines[:index]):
            raise ValueError(f"engine {index} of {len(engines)} ({engine!r}) is listed twice; pass each engine once")
    return list(engines)
