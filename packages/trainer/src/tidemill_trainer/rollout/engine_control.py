"""The answers of the driver to `tidemill engines`, in a thread beside the training loop."""

from dataclasses import replace

from tidemill_trainer.doctor.room import Demand, check_room
from tidemill_trainer.ray_session import node_resources
from tidemill_trainer.rollout.engine_requests import EngineRequestError, EngineRequests
from tidemill_trainer.rollout.engines import Engines
from tidemill_trainer.stalls.inspection import answers

_ANSWER_S = 2.0


def receive(requests: EngineRequests, engines: Engines, demand: Demand) -> None:
    """Answer new requests: show the engines, refuse what is not possible, and pass the others to the training loop.

    Args:
        requests: requests to the run.
        engines: engines of the run.
        demand: resources of one engine.
    """
    for request in requests.receive():
        try:
            if request.action == "list":
                request.answer(table(engines), status=0)
                continue
            if request.action == "add":
                _check_free(replace(demand, num_processes=request.count))
            engines.accept(request)
            request.answer("accepted; the run begins with it between two phases of its step")
        except Exception as error:  # noqa: BLE001 - the user sees it; the run does not depend on it
            is_refused = isinstance(error, EngineRequestError)
            request.answer(str(error) if is_refused else f"{type(error).__name__}: {error}", status=1)


def _check_free(demand: Demand) -> None:
    """Check that free resources of the cluster suffice.

    Raises:
        EngineRequestError: they do not; the message has what is missing on each node.
    """
    for finding in check_room(node_resources(are_free=True), [demand]):
        raise EngineRequestError(
            f"{finding.cause}\nadd fewer, remove others before, or add a node to the Ray cluster of the run"
        )


def table(engines: Engines) -> str:
    """Return a line for each engine: name, node, devices, weight version, requests and state."""
    shown = engines.all()
    serving = [engine for engine in shown if engine.started is None]
    columns = {
        method: answers({engine.name: getattr(engine.worker, method).remote() for engine in serving}, _ANSWER_S)
        for method in ("devices", "get_weight_version", "queue")
    }
    rows: list[tuple[str, ...]] = [("engine", "node", "devices", "version", "requests", "state")]
    for engine in shown:
        host = engine.group.hosts()[0].hostname if engine in serving else ""
        state = "has no weights yet" if engines.version is None else engine.state
        rows.append((engine.name, host, *(str(column.get(engine.name, "")) for column in columns.values()), state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
