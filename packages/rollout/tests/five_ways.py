"""The same task as reward function, gym-style pair, agent in this process and agent with the `openai` client."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from tidemill_rollout import Endpoint, EpisodeFn, EpisodeResult, Generation, Policy, Problem
from tidemill_rollout.episodes import single_turn
from tidemill_rollout.episodes.command import command
from tidemill_rollout.episodes.gym import gym_episode

PROBLEM = Problem(prompt=[{"role": "user", "content": "what is 2 + 40"}], ground_truth="42", extra_info={"index": 2})
SEEDS = (3, 4, 5)
_AGENT = """
import json, openai, sys
problem = json.loads(sys.stdin.readline())
reply = openai.OpenAI().chat.completions.create(model="policy", messages=problem["prompt"])
print(float(reply.choices[0].message.content == problem["ground_truth"]))
"""


class SeededEngine:
    """An engine whose reply depends on the prompt and the seed of the request."""

    def __init__(self, tokenizer) -> None:
        self._replies = [tokenizer.encode(f"{text}<|im_end|>") for text in ("42", "forty-two", "the answer is 42")]

    async def generate(self, token_ids, sampling, *, session_id) -> Generation:
        source = random.Random(f"{list(token_ids)} {sampling}")
        ids = self._replies[sampling.seed % len(self._replies)]
        log_probs = [-source.random() for _ in ids]
        return Generation(token_ids=ids, log_probs=log_probs, finish_reason="stop", versions=[("0", len(ids))])


class Question:
    """The task as an environment."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def reset(self, *, seed):
        return self._problem.messages, {}

    def step(self, action):
        return "", float(action == self._problem.ground_truth), True, False, {}

    def close(self) -> None:
        pass


def exact(data_source, solution_str, ground_truth, extra_info) -> float:
    return float(solution_str == ground_truth)


async def agent(problem, session) -> float:
    reply = await session.generate(problem.messages)
    return float(reply.message["content"] == problem.ground_truth)


def ways(interpreter: Path) -> dict[str, EpisodeFn]:
    """Return all but the verifiers environment; the `openai` client runs in `interpreter`."""
    return {
        "reward function": single_turn(exact),
        "gym": gym_episode(Question),
        "agent": agent,
        "openai": command([str(interpreter), "-c", _AGENT]),
    }


def run(tokenizer, episodes: Mapping[str, EpisodeFn]) -> dict[str, Sequence[EpisodeResult]]:
    """Return the results of each way, for the same seeds."""

    async def run_all() -> dict[str, Sequence[EpisodeResult]]:
        async with Endpoint() as endpoint:
            policy = Policy(SeededEngine(tokenizer), tokenizer, endpoint=endpoint)
            return {
                name: await asyncio.gather(*(policy.run(episode, PROBLEM, seed=seed) for seed in SEEDS))
                for name, episode in episodes.items()
            }

    return asyncio.run(run_all())


def assert_equal(results: Mapping[str, Sequence[EpisodeResult]]) -> None:
    """All ways have the same rewards, token ids, masks and log-probs, which differ between the seeds."""
    expected = results["reward function"]
    for name, others in results.items():
        assert [other.outcome.status for other in others] == ["ok"] * len(SEEDS), (name, others[0].outcome.reason)
        assert [other.outcome.reward for other in others] == [one.outcome.reward for one in expected], name
        assert [other.trajectories for other in others] == [one.trajectories for one in expected], name
    assert {one.outcome.reward for one in expected} == {0.0, 1.0}
    assert len({tuple(one.trajectories[0].token_ids) for one in expected}) == len(SEEDS)
