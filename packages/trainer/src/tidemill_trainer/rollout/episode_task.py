"""What an episode worker receives and returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill_dataproto import DataProto
from tidemill_rollout import Outcome, Problem
from tidemill_rollout.fork import Fork


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTask:
    """One episode to run.

    Attributes:
        number: position among the episodes of the step.
        problem: the problem.
        sample: number of the episode among those of the problem.
        seed: seed of the session, for the environment and, unless decoding is greedy, for the engine; None: the engine
            chooses.
        is_shown: return the messages, for the report.
    """

    number: int
    problem: Problem
    sample: int = 0
    seed: int | None = None
    is_shown: bool = False

    @property
    def name(self) -> str:
        """Name of the episode in logs and reports, unique in the run."""
        return f"{self.problem.id}/{self.sample}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An attempt at an episode that ended with an environment error.

    Attributes:
        reason: the error.
        num_tokens: tokens that were sampled for it.
    """

    reason: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSummary:
    """How an episode ended. Its tokens are in the rows of an `EpisodePart`.

    Attributes:
        task: the episode.
        outcome: outcome of the last attempt.
        failures: attempts that failed, with the last one if `outcome` is an environment error.
        counts: counts of the last attempt's session (see `Session.metrics`).
        seconds: duration of the last attempt.
        forks: an example for each reason for which the last attempt started another token sequence.
    """

    task: EpisodeTask
    outcome: Outcome
    failures: Sequence[Failure] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    forks: Sequence[Fork] = ()

    @property
    def acc(self) -> float:
        """Accuracy: the metric "acc" of the outcome, or else the reward."""
        return self.outcome.metrics.get("acc", self.outcome.reward)

    @property
    def num_tokens(self) -> int:
        """Tokens that the engines returned in all attempts."""
        names = ("num_sampled_tokens", "num_unused_tokens") if self.outcome.is_trainable else ()
        return int(sum(self.counts[name] for name in names)) + sum(failure.num_tokens for failure in self.failures)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePart:
    """The episodes that a worker has finished since its last part.

    Attributes:
        rows: rows of the trainable episodes (see `training_rows`); None without one.
        summaries: all finished episodes.
        num_generated: tokens that the engines have returned to the worker since its last part.
    """

    rows: DataProto | None
    summaries: Sequence[EpisodeSummary]
    num_generated: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Episodes:
    """The episodes of one step or validation.

    Attributes:
        rows: rows of the trainable episodes, ordered by episode (see `training_rows`); None without one.
        summaries: one per episode, ordered by number.
        num_generated: tokens that the engines returned for all attempts.
        num_lost: those of them that belonged to unfinished episodes of lost workers.
        num_restarts: workers that died or were blocked, and were replaced.
        dropped: why trainable episodes have no rows, by number.
        baselines: one greedy episode per problem, with negative numbers, for estimators that compare with it.
        dropped_rows: rows of the episodes in `dropped` that are shown; None without one.
    """

    rows: DataProto | None
    summaries: list[EpisodeSummary]
    num_generated: int
    num_lost: int
    num_restarts: int
    dropped: Mapping[int, str] = field(default_factory=dict)
    baselines: Sequence[EpisodeSummary] = ()
    dropped_rows: DataProto | None = None
