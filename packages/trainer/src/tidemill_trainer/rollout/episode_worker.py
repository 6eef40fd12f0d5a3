"""A process that runs episodes."""

import asyncio
import copy
import gc
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import torch
from tidemill_rollout import (
    Endpoint,
    Engine,
    EnginePool,
    EpisodeFn,
    EpisodeResult,
    Generation,
    Policy,
    SamplingParams,
    Session,
    SessionConfig,
    run_episode,
)
from transformers import AutoConfig, AutoTokenizer

from tidemill_trainer.config import Config
from tidemill_trainer.episodes import create_episode
from tidemill_trainer.rollout.episode_task import EpisodePart, EpisodeSummary, EpisodeTask, Failure
from tidemill_trainer.rollout.exchange import Mailbox, Request, Result
from tidemill_trainer.rollout.rows import training_rows
from tidemill_trainer.sft.example import end_of_reply
from tidemill_trainer.stalls.member import join_run

PART_INTERVAL_S = 1.0
"""Seconds between two parts of `EpisodeWorker.run`; a worker that returns none is blocked."""
_UNUSED_POSITIONS = 6
"""SGLang refuses prompts that leave no more of the model's positions free, also those of interrupted requests."""


class EpisodeWorker:
    """Run episodes in one process. An async Ray actor.

    Args:
        number: number of the worker.
        engines: numbers of the engines that fetch requests; see `open` and `close` for others.
        log_dir: folder for the log of this process.
    """

    def __init__(self, number: int, engines: Sequence[int], log_dir: str) -> None:
        join_run(log_dir, f"episodes_{number}")
        self._mailboxes = {engine: Mailbox(_name(engine)) for engine in engines}
        members = {_name(engine): mailbox for engine, mailbox in self._mailboxes.items()}
        self._pool = EnginePool(members, awaits_restart=True)
        self._clock = _Clock()
        self._endpoint: Endpoint | None = None
        self._experts_shape: tuple[int, int] | None = None

    async def load(self, config: Config) -> None:
        """Load the user's functions and the tokenizer; the episodes of later calls of `run` use them.

        Raises:
            ConfigError: a function cannot be loaded.
        """
        torch.set_num_threads(config.actor.omp_num_threads)
        self._config = config
        self._limit = asyncio.Semaphore(config.episode.max_concurrent)
        self._episode: EpisodeFn = create_episode(config)
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
        if self._endpoint is None:
            self._endpoint = await Endpoint().__aenter__()
        training = session_config(config)
        # The engines have no tokenizer, and end a reply at the tokens that the model's configuration names.
        ends = {tokenizer.eos_token_id, *([end_of_reply(tokenizer)] if tokenizer.chat_template else [])}
        sampling = replace(training.sampling, extra={"stop_token_ids": sorted(ends)})
        model = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
        text = model.get_text_config()
        length, positions = training.context_length, getattr(text, "max_position_embeddings", None)
        length = length if positions is None else min(length, positions - _UNUSED_POSITIONS)
        training = replace(training, sampling=sampling, context_length=length)
        greedy = SamplingParams(max_tokens=sampling.max_tokens, temperature=0.0, extra=sampling.extra)
        validation = replace(training, sampling=greedy, is_training=False)
        self._training = Policy(self._pool, tokenizer, training)
        self._validation = Policy(self._pool, tokenizer, validation)
        if config.actor.router_replay.mode == "R3":
            self._experts_shape = text.num_hidden_layers, text.num_experts_per_tok
        gc.collect()
        gc.freeze()  # otherwise each collection visits all objects that the imports created

    async def run(self, tasks: Sequence[EpisodeTask], *, greedy: bool) -> AsyncIterator[EpisodePart]:
        """Run episodes at the same time and yield those that have finished, each second and at the end.

        Args:
            tasks: the episodes.
            greedy: decode greedily, for validation.
        """
        engine = _Counted(self._pool, greedy=greedy)
        policy = copy.copy(self._validation if greedy else self._training)
        policy.engine = engine
        lengths = () if greedy else self._config.rollout.response_lengths

        async def run(task: EpisodeTask) -> tuple[EpisodeSummary, EpisodeResult]:
            async with self._limit:
                return await self._solve(task, policy, with_length(policy.config.sampling, lengths, task.seed))

        running = {asyncio.create_task(run(task)) for task in tasks}
        try:
            while running:
                done, running = await asyncio.wait(running, timeout=PART_INTERVAL_S)
                yield self._part([task.result() for task in done], engine.take_count())
        finally:
            for task in running:
                task.cancel()

    async def _solve(
        self, task: EpisodeTask, policy: Policy, sampling: SamplingParams
    ) -> tuple[EpisodeSummary, EpisodeResult]:
        """Run an episode, again after an environment error until the attempts are used up."""
        config = self._config.episode
        failures: list[Failure] = []
        assert self._endpoint is not None
        while True:
            session = policy.session(f"{task.name}/{len(failures)}", seed=task.seed, sampling=sampling)
            self._endpoint.add(session)
            try:
                result = await run_episode(
                    self._episode, task.problem, session, timeout_s=config.timeout_s, clock=self._clock
                )
            finally:
                self._endpoint.remove(session)
                self._pool.forget(session.id)  # each validation has sessions of the same names
            if not result.outcome.is_trainable:
                counts = result.metrics
                num_tokens = int(counts["num_sampled_tokens"] + counts["num_unused_tokens"])
                failures.append(Failure(reason=result.outcome.reason, num_tokens=num_tokens))
            if result.outcome.is_trainable or len(failures) > config.max_retries:
                return _summary(task, result, failures, session), result

    def _part(self, finished: Sequence[tuple[EpisodeSummary, EpisodeResult]], num_generated: int) -> EpisodePart:
        trained = [(summary.task, result) for summary, result in finished if result.outcome.is_trainable]
        has_rows = any(result.trajectories for _, result in trained)
        return EpisodePart(
            rows=training_rows(trained, experts_shape=self._experts_shape) if has_rows else None,
            summaries=[summary for summary, _ in finished],
            num_generated=num_generated,
        )

    async def queue(self) -> str:
        """Describe the requests that wait for engines, for reports about a run that makes no progress."""
        return ", ".join(str(mailbox) for mailbox in self._mailboxes.values())

    async def take(self, engine: int) -> tuple[list[Request], list[int]]:
        """Wait for new or cancelled requests to an engine, which calls this."""
        return await self._mailbox(engine).take()

    async def give(self, engine: int, results: Sequence[Result]) -> None:
        """Deliver the results of an engine, which calls this."""
        self._mailboxes[engine].give(results)

    async def fail(self, engine: int, reason: str) -> None:
        """Fail the requests to an engine that has stopped."""
        self._mailboxes[engine].fail(reason)

    async def open(self, engine: int) -> None:
        """Send requests to an engine that was added or restarted, and has the current weights."""
        mailbox = self._mailbox(engine)
        if mailbox.reopen():
            self._pool.add(_name(engine), mailbox)

    async def set_clock(self, *, runs: bool) -> None:
        """Let the time of episodes run or stand still."""
        self._clock.set(runs=runs)

    async def drain(self, engine: int) -> None:
        """Send no further requests to an engine, and wait until it has answered those that it has."""
        self._pool.remove(_name(engine))
        await self._mailboxes[engine].drained()

    async def close(self, engine: int) -> None:
        """Remove an engine that has exited. Requests that it has not answered are sent to others."""
        mailbox = self._mailboxes.pop(engine, None)
        if mailbox is not None:  # else this worker has started later
            mailbox.fail("it was removed from the run")

    def _mailbox(self, engine: int) -> Mailbox:
        """Return the mailbox of an engine; one that is not known yet is closed."""
        if engine not in self._mailboxes:
            self._mailboxes[engine] = Mailbox(_name(engine), is_open=False)
        return self._mailboxes[engine]


def _name(engine: int) -> str:
    return f"engine {engine}"


class _Clock:
    """A clock that can stand still. A call returns the seconds in which it ran."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started: float | None = time.monotonic()

    def set(self, *, runs: bool) -> None:
        self._seconds = self()
        self._started = time.monotonic() if runs else None

    def __call__(self) -> float:
        return self._seconds + (0.0 if self._started is None else time.monotonic() - self._started)


class _Counted:
    """An engine that counts the tokens it returns.

    Args:
        engine: the engine.
        greedy: decode greedily, also where an agent sends the temperature of the training.
    """

    def __init__(self, engine: Engine, *, greedy: bool) -> None:
        self._engine = engine
        self._greedy = greedy
        self._num_tokens = 0

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        if self._greedy:
            sampling = replace(sampling, temperature=0.0)
        generation = await self._engine.generate(token_ids, sampling, session_id=session_id)
        self._num_tokens += len(generation.token_ids)
        return generation

    def take_count(self) -> int:
        """Return the number of tokens since the last call."""
        count, self._num_tokens = self._num_tokens, 0
        return count


def session_config(config: Config) -> SessionConfig:
    """Return the sampling parameters and limits of training episodes."""
    rollout = config.rollout
    return SessionConfig(
        sampling=SamplingParams(
            max_tokens=rollout.response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        ),
        context_length=config.data.max_prompt_length + rollout.response_length,
        max_turns=config.episode.max_turns,
        generate_timeout_s=rollout.timeout_s,
    )


def with_length(sampling: SamplingParams, lengths: Sequence[int], seed: int | None) -> SamplingParams:
    """Return the sampling parameters of replies with one of these lengths, which the seed selects, if there are any."""
    if not lengths or seed is None:
        return sampling
    return replace(sampling, max_tokens=lengths[seed % len(lengths)], extra={**sampling.extra, "ignore_eos": True})


def _summary(task: EpisodeTask, result: EpisodeResult, failures: Sequence[Failure], session: Session) -> EpisodeSummary:
    return EpisodeSummary(
        task=task,
        outcome=result.outcome,
        failures=failures,
        counts=result.metrics,
        seconds=result.seconds,
        forks=list(session.recorder.fork_examples.values()),
    )
