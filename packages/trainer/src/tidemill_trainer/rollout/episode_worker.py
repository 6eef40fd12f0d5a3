"""A process that runs episodes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tidemill_rollout import (
    EnginePool,
    EpisodeFn,
    EpisodeResult,
    Policy,
    Problem,
    SamplingParams,
    SessionConfig,
    load_episode,
    run_episode,
)
from tidemill_rollout.episodes import single_turn
from transformers import AutoTokenizer

from tidemill_trainer.logs import redirect_output
from tidemill_trainer.rewards import load_reward
from tidemill_trainer.rollout.exchange import Mailbox, Request, Result


def create_episode(name: str, reward_function: str) -> EpisodeFn:
    """Return an episode by name (see `load_episode`); "single_turn" is scored by the reward function of that name."""
    return single_turn(load_reward(reward_function)) if name == "single_turn" else load_episode(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTask:
    """One episode to run.

    Attributes:
        problem: the problem.
        sample: number of the episode among those of the problem.
        seed: seed of the session; None: the engine chooses.
    """

    problem: Problem
    sample: int
    seed: int | None


class EpisodeWorker:
    """Run episodes in one process, as many at a time as there are. An async Ray actor.

    Args:
        number: number of the worker.
        create_episode: returns the episode function; called in this process, which imports the user's code.
        tokenizer_path: folder of the tokenizer.
        trust_remote_code: passed to `AutoTokenizer`.
        config: sampling parameters and limits for training. Validation decodes greedily.
        timeout_s: time limit of an episode.
        num_engines: number of engines that fetch requests.
        log_dir: folder for the log of this process.
    """

    def __init__(
        self,
        number: int,
        create_episode: Callable[[], EpisodeFn],
        tokenizer_path: str,
        *,
        trust_remote_code: bool,
        config: SessionConfig,
        timeout_s: float,
        num_engines: int,
        log_dir: str,
    ) -> None:
        redirect_output(log_dir, f"episodes_{number}")
        self._episode = create_episode()
        self._timeout_s = timeout_s
        self._mailboxes = [Mailbox(f"engine {rank}") for rank in range(num_engines)]
        pool = EnginePool({f"engine {rank}": mailbox for rank, mailbox in enumerate(self._mailboxes)})
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=trust_remote_code)
        self._training = Policy(pool, tokenizer, config)
        greedy = SamplingParams(max_tokens=config.sampling.max_tokens, temperature=0.0)
        self._validation = Policy(pool, tokenizer, replace(config, sampling=greedy, is_training=False))

    async def ready(self) -> None:
        """Return when the worker is constructed."""

    async def run(self, tasks: Sequence[EpisodeTask], *, greedy: bool) -> list[EpisodeResult]:
        """Run episodes at the same time and return their results in the same order.

        Args:
            tasks: the episodes.
            greedy: decode greedily, for validation.
        """
        policy = self._validation if greedy else self._training
        sessions = [policy.session(f"{task.problem.id}/{task.sample}", seed=task.seed) for task in tasks]
        return list(
            await asyncio.gather(
                *(
                    run_episode(self._episode, task.problem, session, timeout_s=self._timeout_s)
                    for task, session in zip(tasks, sessions, strict=True)
                )
            )
        )

    async def take(self, engine: int) -> tuple[list[Request], list[int]]:
        """Wait for new or cancelled requests to an engine, which calls this."""
        return await self._mailboxes[engine].take()

    async def give(self, engine: int, results: Sequence[Result]) -> None:
        """Deliver the results of an engine, which calls this."""
        self._mailboxes[engine].give(results)

    async def fail(self, engine: int, reason: str) -> None:
        """Fail the requests to an engine that has stopped."""
        self._mailboxes[engine].fail(reason)
