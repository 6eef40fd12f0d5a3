"""Episodes that never return, fork or use their session late; templates that raise; engines that die."""

import asyncio
import contextlib
import os
import pickle
import re
import threading
import time

import pytest
from episode_cases import PROBLEM, asks, asks_blocking, run
from tidemill_rollout import (
    EngineDiedError,
    EnginePool,
    Generation,
    LimitError,
    Policy,
    SamplingParams,
    SessionConfig,
    SessionEndedError,
    run_episode,
)


class WaitingEngine:
    """An engine that never replies and counts its cancelled requests."""

    def __init__(self):
        self.started = threading.Event()
        self.num_cancelled = 0

    async def generate(self, token_ids, sampling, *, session_id):
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


class MortalEngine:
    """An engine that dies after a number of requests."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests

    async def generate(self, token_ids, sampling, *, session_id) -> Generation:
        self._num_requests -= 1
        if self._num_requests < 0:
            raise EngineDiedError("connection reset")
        count = sampling.max_tokens
        tokens = [(sum(token_ids) + sampling.seed + position) % 97 for position in range(count)]
        return Generation(token_ids=tokens, log_probs=[-1.0] * count, finish_reason="length", versions=[("0", count)])


@pytest.mark.parametrize("episode", [asks, asks_blocking])
def test_time_limit_cancels_the_request_to_the_engine(tokenizer, episode):
    engine = WaitingEngine()

    def clock():  # stands still until the engine has the request
        return time.monotonic() if engine.started.is_set() else 0.0

    async def limited():
        session = Policy(engine, tokenizer).session()
        return await run_episode(episode, PROBLEM, session, timeout_s=0.05, clock=clock)

    result = asyncio.run(limited())
    assert (result.outcome.status, result.outcome.reason) == ("truncated", "time: no result within 0.05 s")
    assert (engine.num_cancelled, result.trajectories) == (1, [])


@pytest.mark.parametrize("episode", [asks, asks_blocking])
def test_cancelling_the_caller_cancels_the_episode_and_its_request(tokenizer, episode):
    engine = WaitingEngine()

    async def cancel():
        task = asyncio.create_task(Policy(engine, tokenizer).run(episode, PROBLEM))
        while not engine.started.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert engine.num_cancelled == 1


def test_time_limit_ends_an_episode_without_async_that_never_returns(scripted):
    is_stopped = threading.Event()
    errors = []

    def sleeps(problem, session):
        is_stopped.wait()
        try:
            session.generate(text="hello")
        except SessionEndedError as error:
            errors.append(error)

    policy = scripted("x<|im_end|>")

    async def many():
        slow = [policy.run(sleeps, PROBLEM, timeout_s=0.05) for _ in range(50)]  # more than a pool of threads has
        results = await asyncio.gather(*slow, policy.run(asks_blocking, PROBLEM))
        is_stopped.set()
        while len(errors) < 50:
            await asyncio.sleep(0.001)
        return results

    *slow, other = asyncio.run(many())
    assert {result.outcome.reason for result in slow} == {"time: no result within 0.05 s"}
    assert other.outcome.status == "ok"
    assert "has ended" in str(errors[0])


def test_time_limit_ends_an_episode_that_ignores_its_cancellation(scripted, monkeypatch):
    monkeypatch.setattr("tidemill_rollout.episode.CANCEL_GRACE_S", 0.05)
    is_stopped = False

    async def ignores(problem, session):
        while not is_stopped:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)

    async def limited():
        nonlocal is_stopped
        result = await scripted("x<|im_end|>").run(ignores, PROBLEM, timeout_s=0.05)
        is_stopped = True  # else asyncio.run would wait for the episode
        return result

    assert asyncio.run(limited()).outcome.reason == "time: no result within 0.05 s"


def test_error_in_the_clean_up_after_the_time_limit_is_still_the_time_limit(scripted):
    async def fails_late(problem, session):
        try:
            await asyncio.sleep(1000)
        finally:
            raise ValueError("clean-up failed")

    assert run(scripted("x<|im_end|>"), fails_late, timeout_s=0.05).outcome.status == "truncated"


def test_session_that_is_used_after_the_episode_refuses_and_leaves_its_outcome_unchanged(scripted):
    late = []
    has_ended = asyncio.Event()

    async def leaves_a_task(problem, session):
        async def use_later():
            await has_ended.wait()
            await session.generate(text="hello")

        late.append(asyncio.create_task(use_later()))
        return 1.0

    policy = scripted("x<|im_end|>")

    async def use():
        result = await policy.run(leaves_a_task, PROBLEM)
        has_ended.set()
        with pytest.raises(SessionEndedError, match="has ended"):
            await late[0]
        return result

    result = asyncio.run(use())
    assert (result.outcome.status, result.trajectories) == ("ok", [])


def test_request_that_runs_when_the_episode_returns_is_cancelled(tokenizer):
    engine = WaitingEngine()
    requests = []

    async def returns_early(problem, session):
        requests.append(asyncio.create_task(session.generate(text="hello")))
        while not engine.started.is_set():
            await asyncio.sleep(0)
        return 1.0

    async def use():
        result = await Policy(engine, tokenizer).run(returns_early, PROBLEM)
        with pytest.raises(SessionEndedError, match="ended before the engine replied"):
            await requests[0]
        return result

    assert asyncio.run(use()).outcome.status == "ok"
    assert engine.num_cancelled == 1


def test_thousand_branches_have_a_row_each(scripted):
    async def episode(problem, session):
        await asyncio.gather(*(session.branch().generate(text="hello") for _ in range(1000)))
        return 1.0

    result = run(scripted("x<|im_end|>"), episode)
    assert len(result.trajectories) == 1000
    assert result.metrics["num_trained_tokens"] == result.metrics["num_sampled_tokens"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("is_async", [True, False])
def test_episode_that_forks_has_one_outcome_and_its_child_ends(scripted, is_async):
    parent, children = os.getpid(), []

    def forks(problem, session):
        children.append(os.fork())
        return 1.0

    async def forks_async(problem, session):
        return forks(problem, session)

    async def both():
        policy = scripted("x<|im_end|>")
        return await asyncio.gather(policy.run(forks_async if is_async else forks, PROBLEM), policy.run(asks, PROBLEM))

    results = asyncio.run(both())
    if os.getpid() != parent:
        os._exit(99)
    assert [result.outcome.status for result in results] == ["ok", "ok"]
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) != 99


def test_template_that_raises_is_an_environment_error_and_affects_no_other(bpe):
    tokenizer = bpe("{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}hello")

    async def rejected(problem, session):
        await session.generate(problem.messages * 2)

    async def accepted(problem, session):
        await session.generate(problem.messages)
        return 1.0

    async def both():
        policy = Policy(WaitingEngine(), tokenizer)
        return await asyncio.gather(policy.run(rejected, PROBLEM), policy.run(accepted, PROBLEM, timeout_s=0.05))

    failed, other = asyncio.run(both())
    assert failed.outcome.status == "environment_error"
    assert re.match(r"TemplateError: .*rejects these 2 messages \(roles user, user\): .*one", failed.outcome.reason)
    assert other.outcome.reason == "time: no result within 0.05 s"  # its request reached the engine


def test_episode_whose_engine_dies_has_the_tokens_of_an_undisturbed_one_and_fails_without_engines(tokenizer):
    async def episode(problem, session):
        first = await session.generate(problem.messages)
        await session.generate([*problem.messages, first.message, *problem.messages])
        return 1.0

    def run(*engines: MortalEngine):
        pool = EnginePool({str(number): engine for number, engine in enumerate(engines)})
        policy = Policy(pool, tokenizer, SessionConfig(sampling=SamplingParams(max_tokens=4)))
        return asyncio.run(policy.run(episode, PROBLEM, seed=3))

    expected = run(MortalEngine(2))
    result = run(MortalEngine(1), MortalEngine(1))
    assert (result.outcome, result.trajectories) == (expected.outcome, expected.trajectories)
    failed = run(MortalEngine(1), MortalEngine(0))
    assert failed.outcome.status == "environment_error"
    assert re.match("EngineDiedError: none of 2 engines is left .*connection reset", failed.outcome.reason)
    assert failed.metrics["num_turns"] == 1.0


@pytest.mark.parametrize("is_async", [True, False])
def test_error_whose_text_cannot_be_formed_is_an_environment_error(scripted, is_async):
    class ApiError(Exception):
        def __str__(self):
            return self.response.text

    async def coroutine(problem, session):
        raise ApiError

    def function(problem, session):
        raise ApiError

    outcome = run(scripted("x<|im_end|>"), coroutine if is_async else function).outcome
    assert outcome.status == "environment_error"
    assert outcome.reason.startswith("ApiError: ")


@pytest.mark.parametrize("is_async", [True, False])
def test_stop_iteration_names_the_line_that_raised_it(scripted, is_async):
    async def coroutine(problem, session):
        return next(iter([]))

    def function(problem, session):
        return next(iter([]))

    outcome = run(scripted("x<|im_end|>"), coroutine if is_async else function).outcome
    assert outcome.reason.startswith("StopIteration: ")
    assert "(in test_episode_faults.py:" in outcome.reason


def test_limit_error_crosses_processes():
    error = pickle.loads(pickle.dumps(LimitError("turns", "too many moves")))
    assert (error.limit, str(error)) == ("turns", "too many moves")
