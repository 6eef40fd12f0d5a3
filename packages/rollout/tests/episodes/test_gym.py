"""Environments with reset and step: gymnasium's interface, textarena and skyrl-gym."""

import asyncio
import random
import threading

import pytest
from tidemill_rollout import Problem, SessionConfig
from tidemill_rollout.episodes.gym import gym_episode


class Countdown:
    """An environment that gives 0.25 for each step, terminates after 3, and records the calls."""

    def __init__(self, problem, truncates=False):
        self.calls = []
        self.threads = set()
        self._truncates = truncates

    def _call(self, *call):
        self.calls.append(call)
        self.threads.add(threading.current_thread())

    def reset(self, *, seed):
        self._call("reset", seed)
        return "start", {}

    def step(self, action):
        self._call("step", action)
        is_last = len([call for call in self.calls if call[0] == "step"]) == 3
        return "again", 0.25, is_last and not self._truncates, is_last and self._truncates, {}

    def close(self):
        self._call("close")


def play(policy, *, make_env=Countdown, timeout_s=float("inf"), **options):
    envs, sessions = [], []

    def make(problem):
        envs.append(make_env(problem))
        return envs[0]

    def episode(problem, session):
        sessions.append(session._session)
        return gym_episode(make, **options)(problem, session)

    result = asyncio.run(policy.run(episode, Problem(prompt="", ordinal=7), timeout_s=timeout_s))
    return result, envs[0], sessions[0].recorder.turns


def test_replies_are_actions_and_the_reward_is_the_sum_of_the_steps(scripted):
    result, env, turns = play(scripted("hello<|im_end|>"))
    assert env.calls == [("reset", 7), *[("step", "hello")] * 3, ("close",)]
    assert (result.outcome.status, result.outcome.reward, result.outcome.metrics) == ("ok", 0.75, {"num_steps": 3.0})
    assert [message["content"] for message in turns[-1].messages] == [
        "start",
        "hello",
        "again",
        "hello",
        "again",
        "hello",
    ]
    assert len(result.trajectories) == 1
    assert len(env.threads) == 1


def test_truncation_by_the_environment_or_a_limit_keeps_the_rewards_so_far(scripted):
    outcome = play(scripted("x<|im_end|>"), make_env=lambda problem: Countdown(problem, truncates=True))[0].outcome
    assert (outcome.status, outcome.reward) == ("truncated", 0.75)
    assert outcome.reason == "turns: the environment has truncated the episode"
    outcome = play(scripted("x<|im_end|>"), max_turns=2)[0].outcome
    assert (outcome.status, outcome.reward) == ("truncated", 0.5)
    assert outcome.reason == "turns: the environment has not terminated within 2 steps"
    result, env, _ = play(scripted("x<|im_end|>", config=SessionConfig(max_turns=1)))
    assert (result.outcome.reward, result.outcome.reason[:6]) == (0.25, "turns:")
    assert env.calls[-1] == ("close",)


def test_environment_that_raises_is_closed_and_is_an_environment_error(scripted):
    class Broken(Countdown):
        def step(self, action):
            raise OSError("disk")

    result, env, _ = play(scripted("x<|im_end|>"), make_env=Broken)
    assert result.outcome.status == "environment_error"
    assert result.outcome.reason.startswith("OSError: disk (in test_gym.py:")
    assert env.calls[-1] == ("close",)


def test_environment_is_closed_after_the_time_limit(scripted):
    is_closed, may_return = threading.Event(), threading.Event()

    class Slow(Countdown):
        def step(self, action):
            may_return.wait()
            return super().step(action)

        def close(self):
            is_closed.set()

    result, _, _ = play(scripted("x<|im_end|>"), make_env=Slow, timeout_s=0.05)
    assert result.outcome.reason == "time: no result within 0.05 s"
    may_return.set()
    assert is_closed.wait(timeout=60)


class Broken(Countdown):
    def step(self, action):
        raise ValueError("board is full")

    def close(self):
        raise RuntimeError("closed twice")


def test_error_of_close_does_not_hide_that_of_a_step(scripted):
    outcome = play(scripted("x<|im_end|>"), make_env=Broken)[0].outcome
    assert outcome.reason.startswith("ValueError: board is full")


@pytest.mark.parametrize("start", ["start", "go", [{"role": "user", "content": "start"}]])
def test_reset_that_returns_no_pair_is_an_environment_error(scripted, start):
    class Old(Countdown):
        def reset(self, *, seed):
            return start

    result, _, turns = play(scripted("x<|im_end|>"), make_env=Old)
    assert "reset() must return (observation, info), got" in result.outcome.reason
    assert not turns


textarena_episodes = pytest.importorskip("tidemill_rollout.episodes.textarena", exc_type=ImportError)


def test_textarena_game_is_played_to_its_end(scripted):
    def replies(first, *rest):
        return scripted(*(f"[{number}]<|im_end|>" for number in (first, *rest)))

    episode = textarena_episodes.textarena_game("GuessTheNumber-v0", max_number=3)
    problem = Problem(prompt="", ordinal=5)
    result = asyncio.run(replies(1, 2, 3).run(episode, problem))
    assert (result.outcome.status, result.outcome.reward) == ("ok", 1.0)
    again = asyncio.run(replies(1, 2, 3).run(episode, problem))  # the same number for the same ordinal
    assert again.trajectories == result.trajectories


def test_textarena_observation_is_only_what_is_new(scripted, tokenizer):
    policy = scripted("[1]<|im_end|>", "no number<|im_end|>", "no number<|im_end|>")
    episode = textarena_episodes.textarena_game("GuessTheNumber-v0", min_number=1, max_number=1000)
    result = asyncio.run(policy.run(episode, Problem(prompt="", ordinal=0)))
    text = tokenizer.decode(result.trajectories[0].token_ids)
    assert text.count("You are playing Guess The Number") == 1
    assert "user\nThe target number is higher.<|im_end|>" in text
    assert text.count("You attempted an invalid move") == 1
    assert result.outcome.status == "ok"  # an invalid move is the model's; the game ends with what it is worth
    assert result.outcome.reward < 1.0


def test_textarena_games_in_several_threads_are_reproducible(scripted):
    episode = textarena_episodes.textarena_game("Blackjack-v0", max_turns=10)
    problems = [Problem(prompt="", ordinal=ordinal) for ordinal in range(8)]

    async def together():
        policy = scripted("[Hit]<|im_end|>")
        return await asyncio.gather(*(policy.run(episode, problem) for problem in problems))

    async def one_by_one():
        policy = scripted("[Hit]<|im_end|>")
        return [await policy.run(episode, problem) for problem in problems]

    asyncio.run(one_by_one())
    state = random.getstate()
    first, second = asyncio.run(together()), asyncio.run(one_by_one())
    assert random.getstate() == state
    assert [result.trajectories for result in first] == [result.trajectories for result in second]
    assert len({tuple(result.trajectories[0].token_ids) for result in first}) > 1


def test_textarena_game_that_does_not_exist_is_refused_when_the_episode_is_created():
    with pytest.raises(ValueError, match="textarena has no game 'Chess-v9'"):
        textarena_episodes.textarena_game("Chess-v9")


skyrl_episodes = pytest.importorskip("tidemill_rollout.episodes.skyrl_gym", exc_type=ImportError)


def test_skyrl_environment_continues_until_the_answer_is_right(scripted):
    episode = skyrl_episodes.skyrl_environment("gsm8k_multi_turn")
    problem = Problem(
        prompt=[{"role": "user", "content": "what is 6 * 7"}], ground_truth="42", extra_info={"max_turns": 3}
    )
    policy = scripted("hello<|im_end|>", "#### 41<|im_end|>", "#### 42<|im_end|>")
    result = asyncio.run(policy.run(episode, problem))
    assert result.outcome.status == "ok"
    assert result.outcome.reward == pytest.approx(0.2 / 3 + 1.0)
    assert result.outcome.metrics == {"num_steps": 3.0}
    assert len(result.trajectories) == 1
    wrong = asyncio.run(scripted("hello<|im_end|>").run(episode, problem))
    assert (wrong.outcome.reward, wrong.outcome.metrics) == (0.0, {"num_steps": 3.0})


def test_skyrl_environment_with_one_turn_scores_the_reply(scripted):
    episode = skyrl_episodes.skyrl_environment("gsm8k")
    problem = Problem(prompt="what is 6 * 7", ground_truth="42")
    result = asyncio.run(scripted("#### 42<|im_end|>").run(episode, problem))
    assert (result.outcome.status, result.outcome.reward) == ("ok", 1.0)


def test_game_that_never_returns_is_an_error_of_the_others(monkeypatch):
    monkeypatch.setattr(textarena_episodes, "_LOCK_TIMEOUT_S", 0.01)
    with textarena_episodes._random_lock, pytest.raises(RuntimeError, match=r"another game of .* for 0\.01 s"):
        textarena_episodes.TextArenaEnv(None).reset(seed=1)
