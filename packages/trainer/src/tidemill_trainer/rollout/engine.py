"""An engine of a run."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from tidemill_dispatch.ray import CallFuture, RayWorkerGroup

from tidemill_trainer.gpus import Gpu
from tidemill_trainer.out_of_memory import memory_error
from tidemill_trainer.rollout.engine_requests import EngineRequest
from tidemill_trainer.rollout.worker import engine_name


@dataclass(eq=False, kw_only=True, slots=True)
class Engine:
    """One engine of a run.

    Attributes:
        number: its number, which no other engine of the run has or had.
        group: the group of its `RolloutWorker`.
        started: reference to its start; None while it serves.
        is_new: whether it has been added and has not served yet.
        request: the request that adds or removes it.
        drains: references to the wait for its last replies, one per episode worker; None unless it is removed.
    """

    number: int
    group: RayWorkerGroup
    started: ray.ObjectRef | None = None
    is_new: bool = False
    request: EngineRequest | None = None
    drains: Sequence[ray.ObjectRef] | None = None

    @property
    def name(self) -> str:
        """Name in messages, which is also that of its log."""
        return engine_name(self.number)

    @property
    def worker(self) -> Any:
        """Handle of its actor."""
        return self.group.workers[0]

    @property
    def state(self) -> str:
        if self.started is not None:
            return "starting" if self.is_new else "starting again"
        return "serving" if self.drains is None else "finishing its requests"

    def restart(self, gpus: Sequence[Gpu | None]) -> None:
        """Start its process and SGLang again; see `RolloutWorker.start_engine`."""
        self.group.restart([0])
        self.started = self.worker.start_engine.remote(gpus)

    def last_words(self, log_dir: str) -> str:
        """Return which log to read after its death, and the line there about full memory, if there is one."""
        log = Path(log_dir) / f"{self.name}.log"
        line = memory_error(log)
        return f"See {log}" if line is None else f"It had no memory left ({line}); see {log}"

    def is_drained(self) -> bool:
        """Return whether it is being removed, and all episode workers that are alive have its last replies."""
        if self.drains is None:
            return False
        done, left = ray.wait(list(self.drains), num_returns=len(self.drains), timeout=0) if self.drains else ([], [])
        for ref in done:
            with suppress(RayActorError):
                ray.get(ref)
        return not left


def wait_for(calls: Iterable[CallFuture]) -> None:
    """Wait for calls of engines that run at the same time."""
    for call in list(calls):
        call.get()
