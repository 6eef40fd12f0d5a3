"""What the driver of a run waits for: for each wait a name, who it waits for, and limits."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a task on another node inspects its processes; importing the configuration takes seconds
    from tidemill_trainer.config import Config
    from tidemill_trainer.run_config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A time limit.

    Attributes:
        key: config key that sets it, or how it follows from one.
        seconds: its value.
    """

    key: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.key} = {self.seconds:g} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A phase of the run that the driver waits for.

    Attributes:
        name: what is done, for messages such as "waiting for {name}".
        on: who does it.
        limits: the first that expires ends the wait with an error.
        worker_limit: limit that a worker applies to its own waits for others; it reports what it waited for as an
            ordinary error.
    """

    name: str
    on: str
    limits: tuple[Limit, ...] = ()
    worker_limit: Limit | None = None

    def limit_after(self, seconds: float) -> str:
        """Describe the longest limit that has expired after `seconds`, or all limits if none has."""
        limits = self.limits if self.worker_limit is None else (*self.limits, self.worker_limit)
        expired = [limit for limit in limits if limit.seconds <= seconds]
        if expired:
            return f"limit {max(expired, key=lambda limit: limit.seconds)}"
        return f"limit {' or '.join(map(str, limits))}" if limits else "no limit"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveWait:
    """A wait that has begun.

    Attributes:
        wait: what is waited for.
        since_s: `time.monotonic()` at the start.
    """

    wait: Wait
    since_s: float

    def seconds(self) -> float:
        """Return how long it has lasted."""
        return time.monotonic() - self.since_s


def waits_of(config: "Config") -> Mapping[str, Wait]:
    """Return the waits of a run by phase. The phases of a step have their names in `timing_s/*`."""
    start = Limit(key="rollout.timeout_s", seconds=config.rollout.timeout_s)
    call = Limit(key="actor.timeout_s", seconds=config.actor.timeout_s)
    collective = Limit(key="engine.timeout_s", seconds=config.engine.timeout_s)
    update = Limit(key="weight_update.timeout_s", seconds=config.weight_update.timeout_s)
    third = Limit(key="weight_update.timeout_s / 3", seconds=update.seconds / 3)
    episode = Limit(key="episode.timeout_s", seconds=config.episode.timeout_s)
    reply = Limit(key="rollout.timeout_s", seconds=config.rollout.timeout_s)
    first = min(episode, reply, key=lambda limit: limit.seconds)
    training, engines = "the training workers", "the engines"
    episodes = f"the episode workers and {engines}"
    return {
        "start": Wait(name="the start of SGLang and the model", on=f"{engines} and {training}", limits=(start, call)),
        "connect": Wait(name="the connection of workers and engines", on=training, limits=(call,)),
        "load": Wait(name="the episode workers", on="the episode workers", limits=(Limit(key="fixed", seconds=300.0),)),
        "roles": Wait(name="loading the other models", on=training, limits=(call, collective)),
        "step": Wait(name="the step", on="its phases"),
        "gen": Wait(name="the episodes", on=episodes, worker_limit=first),
        "old_log_prob": Wait(name="old log-probs", on=training, limits=(call, collective)),
        "adv": Wait(name="advantages", on="the driver"),
        "update_actor": Wait(name="the update of the policy", on=training, limits=(call, collective)),
        "save_batch": Wait(name="the record of the batch", on=training, limits=(call,)),
        "update_weights": Wait(
            name="the weight update", on=f"{training} and {engines}", limits=(call, update), worker_limit=third
        ),
        "testing": Wait(name="the validation", on=episodes, worker_limit=first),
        "save_checkpoint": Wait(name="the checkpoint", on=training, limits=(call, collective)),
        "load_checkpoint": Wait(name="loading the checkpoint", on=training, limits=(call, collective)),
        "sft": Wait(name="the step of the warm-up", on=training, limits=(call, collective)),
    }


def training_waits(config: "RunConfig") -> Mapping[str, Wait]:
    """Return the waits of a run without engines by phase."""
    call = Limit(key="actor.timeout_s", seconds=config.actor.timeout_s)
    collective = Limit(key="engine.timeout_s", seconds=config.engine.timeout_s)
    on = "the training workers"
    return {
        "start": Wait(name="the start of the model", on=on, limits=(call,)),
        "reference": Wait(name="the log-probs of the reference", on=on, limits=(call, collective)),
        "step": Wait(name="the step", on="its phases"),
        "update_actor": Wait(name="the update of the policy", on=on, limits=(call, collective)),
        "testing": Wait(name="the validation", on=on, limits=(call, collective)),
        "save_checkpoint": Wait(name="the checkpoint", on=on, limits=(call, collective)),
        "load_checkpoint": Wait(name="loading the checkpoint", on=on, limits=(call, collective)),
    }


class Waits:
    """The active waits of the driver and its last progress.

    The main thread enters and leaves waits; other threads may read.

    Args:
        waits: the waits by phase.
    """

    def __init__(self, waits: Mapping[str, Wait]) -> None:
        self._waits = waits
        self._active: tuple[ActiveWait, ...] = ()
        self._failed: tuple[BaseException, tuple[ActiveWait, ...]] | None = None
        self._done: ActiveWait | None = None
        self._done_at_s = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Record that the driver waits for a phase during the block."""
        outer = self._active
        active = ActiveWait(wait=self._waits[phase], since_s=time.monotonic())
        self._active = (*outer, active)
        try:
            yield
        except BaseException as error:
            if self._failed is None or self._failed[0] is not error:  # the innermost wait comes first
                self._failed = error, self._active
            raise
        else:
            self._done, self._done_at_s = active, time.monotonic()
        finally:
            self._active = outer

    def active(self) -> tuple[ActiveWait, ...]:
        """Return the active waits, the outermost one first."""
        return self._active

    def active_at(self, error: BaseException) -> tuple[ActiveWait, ...]:
        """Return the waits that were active when an error was raised, the outermost one first."""
        return self._failed[1] if self._failed is not None and self._failed[0] is error else ()

    def last_progress(self) -> str:
        """Describe the last wait that ended."""
        if self._done is None:
            return "no wait has ended yet"
        duration = self._done_at_s - self._done.since_s
        return f"{self._done.wait.name}: ended {time.monotonic() - self._done_at_s:.1f} s ago after {duration:.1f} s"
