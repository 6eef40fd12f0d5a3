"""The rollouts of a step: problems become episodes, and episodes become rows to train on."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from tidemill_engines.location import read_from, written_to
from tidemill_rollout import Problem

from tidemill_trainer.algorithm import Algorithm
from tidemill_trainer.checkpoints import CheckpointError
from tidemill_trainer.config import Config
from tidemill_trainer.data import HELD_OUT, PromptLoader, to_problems
from tidemill_trainer.episodes import EpisodeError, NoSignalError
from tidemill_trainer.group_filter import GroupFilter, joined, without
from tidemill_trainer.inputs import Inputs
from tidemill_trainer.ledger import InFlight, Ledger, Settlement
from tidemill_trainer.metrics import episode_metrics, kind_of
from tidemill_trainer.progress import Progress
from tidemill_trainer.rollout.episode_file import load_episodes, save_episodes
from tidemill_trainer.rollout.episode_pool import EpisodePool, Running
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary, EpisodeTask
from tidemill_trainer.run_dir import RunDir

_IN_FLIGHT = "in_flight"
"""Folder in a checkpoint with the finished episodes of steps that have started."""
_MAX_ROUNDS = 10


@dataclass(kw_only=True, slots=True)
class _Round:
    """A round of generation.

    Attributes:
        start: ordinal of the first problem.
        num_problems: number of problems.
        sampled: `n` episodes of each problem.
        greedy: one greedy episode of each; None where the estimator does not need it.
    """

    start: int
    num_problems: int
    sampled: Running
    greedy: Running | None


@dataclass(kw_only=True, slots=True)
class _Step:
    """The generation of a step.

    Attributes:
        rows: row of the training data of each group.
        rounds: rounds that have started.
        finished: episodes of the rounds that have finished, and their greedy baselines.
    """

    rows: list[int] = field(default_factory=list)
    rounds: list[_Round] = field(default_factory=list)
    finished: list[EpisodeSummary] = field(default_factory=list)


class Rollouts:
    """Run the episodes of each step and of the validation, and account for them in the ledger.

    The episodes of step s start when the weights have version s - 1 - `rollout.max_staleness`, and it trains version
    s - 1. So no token is older, all problems are trained on in their order, and nothing is generated in vain.

    Args:
        config: configuration of the run.
        pool: processes that run the episodes; `pool.load(config)` has been called.
        inputs: problems, with `train`.
        run: folder for the ledger and for examples of forks.
        progress: terminal output.
        temporary: folder for temporary files; None: TMPDIR.
    """

    def __init__(
        self,
        config: Config,
        pool: EpisodePool,
        inputs: Inputs,
        run: RunDir,
        progress: Progress,
        temporary: Path | None = None,
    ) -> None:
        assert inputs.train is not None
        self._temporary = temporary
        self._config = config
        self._pool = pool
        self._loader = PromptLoader(inputs.train, config.data.train_batch_size, config.trainer.seed)
        self._val = inputs.val
        self._run = run
        self._progress = progress
        self._ledger = Ledger(run.ledger)
        self._steps: dict[int, _Step] = {}  # whose generation has started, until they are settled
        self._filter = GroupFilter(
            num_groups=config.data.train_batch_size, group_size=config.rollout.n, metric=config.algorithm.filter_groups
        )
        self._has_baselines = "baseline_rewards" in Algorithm.of(config).columns
        self._num_issued = config.rollout.n + self._has_baselines  # episodes of each problem
        limit = config.algorithm.max_num_gen_batches
        self._max_rounds = _MAX_ROUNDS if limit is None else limit
        self._seen_forks: set[str] = set()
        self._has_warned_of_truncated = False

    def save(self, checkpoint: str) -> None:
        """Write what has finished of the later steps that have started to the folder or URL of a checkpoint.

        Call it after `settle`. The other episodes of these steps run on.
        """
        for step, current in self._steps.items():
            [first] = current.rounds  # further rounds start and end in `take`
            info = {"start": first.start, "num_problems": first.num_problems}
            with written_to(f"{checkpoint}/{_IN_FLIGHT}", self._temporary) as folder:
                save_episodes(_file(folder, step), self._pool.collect(first.sampled), **info)
                if first.greedy is not None:
                    save_episodes(_file(folder, step, greedy=True), self._pool.collect(first.greedy), **info)

    def resume(self, step: int, checkpoint: str) -> None:
        """Continue after `step`: take over the episodes of later steps that `save` wrote, and start their others.

        Those start again, from their problem and seed.

        Raises:
            CheckpointError: a file is damaged or cannot be read, or the ledger lacks these steps.
        """
        with _loading(checkpoint), read_from(f"{checkpoint}/{_IN_FLIGHT}", self._temporary) as folder:
            files = sorted(path for path in folder.glob("*.safetensors") if path.stem.isdecimal())
            saved = {int(path.stem): load_episodes(path) for path in files}
            greedy = {
                number: load_episodes(_file(folder, number, greedy=True)) for number in saved if self._has_baselines
            }
        in_flight: dict[int, InFlight] = {}
        for number, (episodes, info) in saved.items():
            num_tokens = episodes.num_generated + (greedy[number][0].num_generated if greedy else 0)
            num_episodes = info["num_problems"] * self._num_issued
            in_flight[number] = InFlight(
                num_problems=info["num_problems"], num_episodes=num_episodes, num_tokens=num_tokens
            )
        self._ledger.resume(step, in_flight)
        self._seen_forks = {fork["reason"] for fork in self._run.read_forks()}
        for number, (episodes, info) in saved.items():
            self._steps[number] = _Step()
            baselines = greedy[number][0] if greedy else None
            self._run_round(number, info["start"], info["num_problems"], episodes, baselines)

    def take(self, step: int) -> Episodes:
        """Return the episodes of a step: `n` for each problem, numbered in the order of the problems.

        Those of the next `rollout.max_staleness` steps start, too, and run on afterwards.

        Raises:
            EpisodeError: more of them failed than `episode.max_error_share`, or none can be trained on, or the batch is
                not complete after `algorithm.max_num_gen_batches` rounds.
        """
        last = max(step, min(step + self._config.rollout.max_staleness, self._config.trainer.total_steps))
        for number in range(step, last + 1):
            if number not in self._steps:
                self._steps[number] = _Step()
                self._start_round(number, self._filter.num_missing([]))
        started = self._steps[step].rounds
        finished = [self._finish_round(step, started[0])]
        while self._filter.metric is not None and (missing := self._filter.num_missing(joined(finished).summaries)) > 0:
            if len(finished) == self._max_rounds:
                raise NoSignalError(self._no_signal(step, joined(finished)))
            self._start_round(step, missing)
            finished.append(self._finish_round(step, started[-1]))
        episodes = self._filter.apply(joined(finished) if len(finished) > 1 else finished[0])
        if episodes.rows is None:
            count = len(episodes.summaries)
            raise EpisodeError(f"step {step}: none of {count} episodes sampled a token that can be trained on")
        self._write_forks(step, episodes.summaries)
        return episodes

    def _start_round(self, step: int, num_problems: int) -> None:
        """Start the episodes of the next problems."""
        start = self._ledger.num_problems
        self._ledger.issue(step, self._loader.rows_at(start, num_problems).tolist(), self._num_issued)
        self._run_round(step, start, num_problems)

    def _run_round(
        self,
        step: int,
        start: int,
        num_problems: int,
        finished: Episodes | None = None,
        baselines: Episodes | None = None,
    ) -> None:
        """Start the episodes of the problems from the ordinal `start` on, except those that have finished."""
        config, n = self._config, self._config.rollout.n
        current = self._steps[step]
        first, number = len(current.rows), len(current.rounds)
        problems = self._loader.problems(start, num_problems, step, first)
        count = num_problems * n
        shown = set(shown_episodes(count, config.trainer.save_samples)) if number == 0 else set()
        entropy = [config.trainer.seed, step]
        seeds = sampling_seeds(entropy if number == 0 else [*entropy, number], count)
        tasks = [
            EpisodeTask(
                number=first * n + k, problem=problems[k // n], sample=k % n, seed=seeds[k], is_shown=k in shown
            )
            for k in range(count)
        ]
        current.rows += self._loader.rows_at(start, num_problems).tolist()
        sampled = self._pool.start(tasks, greedy=False, finished=_of_tasks(finished, tasks))
        greedy = self._start_baselines(problems, first, step, baselines) if self._has_baselines else None
        current.rounds.append(_Round(start=start, num_problems=num_problems, sampled=sampled, greedy=greedy))

    def _start_baselines(
        self, problems: Sequence[Problem], first: int, step: int, finished: Episodes | None
    ) -> Running:
        """Start one greedy episode of each problem."""
        config = self._config
        seeds = sampling_seeds([config.trainer.seed, step, first, 1], len(problems))
        tasks = [
            EpisodeTask(number=-1 - first - k, problem=problem, sample=config.rollout.n, seed=seeds[k])
            for k, problem in enumerate(problems)
        ]
        return self._pool.start(tasks, greedy=True, finished=_of_tasks(finished, tasks))

    def _finish_round(self, step: int, started: _Round) -> Episodes:
        """Wait for the episodes of a round; problems whose greedy episode fails are not trained on."""
        episodes = self._pool.wait(started.sampled)
        greedy = None if started.greedy is None else self._pool.wait(started.greedy)
        new = [*episodes.summaries, *(() if greedy is None else greedy.summaries)]
        self._steps[step].finished += new
        if any(not each.outcome.is_trainable for each in new):
            limit = self._config.episode.max_error_share
            check_errors(self._steps[step].finished, f"step {step}", limit, self._progress)
        self._warn_about_truncated(step, episodes.summaries)
        if greedy is None:
            return episodes
        sound = {each.task.problem.id: each.task.number for each in greedy.summaries if each.outcome.is_trainable}
        dropped = dict.fromkeys(sound.values(), "greedy baseline")
        for each in episodes.summaries:
            if each.outcome.is_trainable and each.task.problem.id not in sound:
                dropped[each.task.number] = "no baseline"
        both = joined([episodes, replace(greedy, rows=None, summaries=[], baselines=greedy.summaries)])
        return without(both, dropped)

    def _warn_about_truncated(self, step: int, summaries: Sequence[EpisodeSummary]) -> None:
        """Warn once if most episodes of a step have exceeded a limit."""
        reasons = [each.outcome.reason for each in summaries if each.outcome.status == "truncated"]
        if self._has_warned_of_truncated or 2 * len(reasons) <= len(summaries):
            return
        self._has_warned_of_truncated = True
        self._progress.warn(
            f"{len(reasons)} of {len(summaries)} episodes of step {step} were truncated ({reasons[0]}); later steps "
            "count them in episode/status/truncated"
        )

    def _no_signal(self, step: int, episodes: Episodes) -> str:
        counts = self._filter.metrics(self._filter.apply(episodes))
        return (
            f"step {step}: after {self._max_rounds} rounds of generation, {counts['filter/num_equal_rewards']:.0f} of "
            f"{counts['filter/num_groups']:.0f} groups have equal rewards and are not trained on, so the batch of "
            f"{self._filter.num_groups} groups is not complete. The problems are too easy or too hard for the policy: "
            "use others, raise rollout.n or algorithm.max_num_gen_batches, or remove algorithm.filter_groups"
        )

    def settle(self, step: int, episodes: Episodes, num_trained_tokens: int) -> dict[str, float]:
        """Account for the episodes of a step after the update, and return the metrics of episodes and ledger.

        Args:
            num_trained_tokens: tokens with mask 1 in the batch of the update.
        """
        assert episodes.rows is not None
        trained = set(episodes.rows["episode"].tolist())
        rows, n = self._steps.pop(step).rows, self._config.rollout.n
        dropped: Counter[str] = Counter()
        dropped_tokens: Counter[str] = Counter({"worker lost": episodes.num_lost})
        failed: Counter[str] = Counter()
        failed_tokens: Counter[str] = Counter()
        for summary in [*episodes.summaries, *episodes.baselines]:
            for failure in summary.failures:
                failed_tokens[kind_of(failure.reason)] += failure.num_tokens
            if not summary.outcome.is_trainable:
                failed[kind_of(summary.outcome.reason)] += 1
                continue
            dropped_tokens["untrained branch"] += int(summary.counts["num_untrained_branch_tokens"])
            dropped_tokens["unused reply"] += int(summary.counts["num_unused_tokens"])
            number = summary.task.number
            if number not in trained:
                reason = episodes.dropped.get(number, "no trained token")
                dropped[reason] += 1
                dropped_tokens[reason] += int(summary.counts["num_trained_tokens"])
        settlement = Settlement(
            num_generated=episodes.num_generated,
            trained=Counter(rows[number // n] for number in trained),
            num_trained_tokens=num_trained_tokens,
            dropped=_pairs(dropped, dropped_tokens),
            failed=_pairs(failed, failed_tokens),
        )
        self._ledger.settle(step, settlement)
        return episode_metrics(episodes, num_trained_tokens) | self._filter.metrics(episodes) | self._ledger.metrics()

    def validate(self) -> Episodes | None:
        """Return the episodes of greedy decoding, one per validation problem; None without problems.

        Raises:
            EpisodeError: more episodes failed than `episode.max_error_share`.
        """
        if self._val is None:
            return None
        problems = to_problems(self._val, "val", ordinal=HELD_OUT)
        seeds = sampling_seeds(
            [self._config.trainer.seed, 0], len(problems)
        )  # for the environments; decoding is greedy
        tasks = [
            EpisodeTask(number=number, problem=problem, seed=seed)
            for number, (problem, seed) in enumerate(zip(problems, seeds, strict=True))
        ]
        episodes = self._pool.wait(self._pool.start(tasks, greedy=True))
        check_errors(episodes.summaries, "the validation", self._config.episode.max_error_share, self._progress)
        return episodes

    def _write_forks(self, step: int, summaries: Sequence[EpisodeSummary]) -> None:
        """Keep the first example of each reason."""
        for summary in summaries:
            for fork in summary.forks:
                if fork.reason not in self._seen_forks:
                    self._seen_forks.add(fork.reason)
                    self._run.append_forks([{"step": step, "episode": summary.task.name, **asdict(fork)}])


def check_errors(summaries: Sequence[EpisodeSummary], where: str, max_error_share: float, progress: Progress) -> int:
    """Warn about failed episodes and return their number.

    Args:
        summaries: all episodes.
        where: what they belong to, for messages.
        max_error_share: share of failed episodes above which the run stops.
        progress: terminal output.

    Raises:
        EpisodeError: more of them failed than `max_error_share`.
    """
    failed = [summary for summary in summaries if not summary.outcome.is_trainable]
    if not failed:
        return 0
    reasons = Counter(summary.outcome.reason for summary in failed).most_common(3)
    examples = "; ".join(f"{count} times {reason}" for reason, count in reasons)
    message = f"{len(failed)} of {len(summaries)} episodes of {where} failed, also when repeated: {examples}"
    if len(failed) > max_error_share * len(summaries):
        raise EpisodeError(
            f"{message}. That is more than episode.max_error_share={max_error_share:g}; repair the environment or the "
            "reward function",
            is_of_engine=any(reason.startswith("Engine") for reason, _ in reasons),
        )
    progress.warn(f"{message}; they are left out")
    return len(failed)


def shown_episodes(count: int, num_shown: int) -> list[int]:
    """Return the numbers of `num_shown` of `count` episodes, spread evenly."""
    num_shown = min(num_shown, count)
    return [position * count // num_shown for position in range(num_shown)]


def sampling_seeds(entropy: Sequence[int], count: int) -> list[int]:
    """Return a seed for each of `count` episodes, in [0, 2**31), a function of the arguments alone."""
    state = np.random.SeedSequence(entropy).generate_state(count, dtype=np.uint32)
    return (state >> 1).tolist()


def _file(folder: Path, step: int, *, greedy: bool = False) -> Path:
    return folder / f"{step:06d}{'_greedy' if greedy else ''}.safetensors"


@contextmanager
def _loading(checkpoint: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot load the checkpoint {checkpoint}: {error}; if it is damaged, remove its folder to resume without "
            "it"
        ) from error


def _of_tasks(episodes: Episodes | None, tasks: Sequence[EpisodeTask]) -> Episodes | None:
    """Give the summaries of loaded episodes their tasks, with the whole problems."""
    if episodes is None:
        return None
    by_number = {task.number: task for task in tasks}
    return replace(episodes, summaries=[replace(each, task=by_number[each.task.number]) for each in episodes.summaries])


def _pairs(episodes: Counter[str], tokens: Counter[str]) -> dict[str, tuple[int, int]]:
    return {
        name: (episodes[name], tokens[name])
        for name in sorted(episodes.keys() | tokens.keys())
        if episodes[name] or tokens[name]
    }
