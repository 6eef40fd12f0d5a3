"""The engines of an updater, without those that failed."""

from collections.abc import Sequence

from tidemill_weight_update.client import EngineClient
from tidemill_weight_update.send.fleet import Fleet, InFlight, Member


class Engines:
    """Engines of an updater. One that fails is excluded until it is readmitted."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self._clients = distinct(clients)
        self._excluded: dict[int, Member] = {}  # by id of the client, which the member keeps alive

    def fleet(self, in_flight: InFlight, readmitted: Sequence[EngineClient] | None = None) -> Fleet:
        """Return the engines of an update.

        Args:
            in_flight: what happens to their running requests.
            readmitted: engines that are updated although they may be excluded or new, and resumed afterwards. None:
                all that are not excluded.

        Raises:
            TypeError: as in `distinct`.
            ValueError: there are no engines, or one is listed twice.
            RuntimeError: all are excluded.
        """
        chosen = [client for client in self._clients if id(client) not in self._excluded]
        if readmitted is not None:
            chosen = distinct(readmitted)
        elif self._clients and not chosen:
            why = "; ".join(f"{member.name}: {member.error}" for member in self._excluded.values())
            raise RuntimeError(f"all engines are excluded because they failed; call readmit() for them. {why}")
        if not chosen:
            raise ValueError("expected at least one engine on rank 0, got none; pass engine clients as engines=[...]")
        fleet = Fleet(chosen, in_flight)
        for member in fleet.members if readmitted is not None else []:
            member.paused = True
            if failed := self._excluded.get(id(member.client)):
                member.unchanged, member.stopped = failed.unchanged, failed.stopped
        return fleet

    def record(self, fleet: Fleet, *, is_complete: bool) -> None:
        """Exclude the engines that failed, unless all refused the update and none changed; include the others.

        Args:
            is_complete: whether the trainer sent everything.
        """
        others = is_complete and any(member.error is None for member in fleet.members)
        for member in fleet.members:
            key = id(member.client)
            if member.error is not None:
                if others or not member.unchanged or key in self._excluded:
                    self._excluded[key] = member
            elif is_complete:
                self._excluded.pop(key, None)
                if not any(member.client is client for client in self._clients):
                    self._clients.append(member.client)


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
