"""Running episodes: results, errors, limits, cancellation; and finding them by name."""

import asyncio
import functools
import json
import re
import threading
import time
from contextlib import suppress
from decimal import Decimal

import numpy as np
import pytest
import torch
from episode_cases import PROBLEM, asks, run
from tidemill_rollout import (
    EngineError,
    LimitError,
    ModelError,
    Outcome,
    Problem,
    SessionConfig,
    load_episode,
    register_episode,
    run_episode,
)


@pytest.mark.parametrize(
    ("result", "reward", "metrics"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        ({"score": 0.5, "acc": True, "answer": "4"}, 0.5, {"acc": 1.0}),
        ({"reward": 2}, 2.0, {}),
        ({"score": 1.0, "acc": np.True_, 7: 2}, 1.0, {"acc": 1.0, "7": 2.0}),
        ({"score": torch.tensor(0.5), "acc": torch.tensor(1.0)}, 0.5, {"acc": 1.0}),
        ({"score": 0.5, "acc": np.array(1.0)}, 0.5, {"acc": 1.0}),
        ({"score": 0.5, "acc": Decimal("0.25")}, 0.5, {"acc": 0.25}),
        ({"score": 1, "a": torch.tensor(2.0), "b": torch.ones(1, 1), "c": np.array(3)}, 1.0, {"a": 2, "b": 1, "c": 3}),
        ({"score": 1, "a": torch.ones(2), "b": np.ones(2), "c": "4", "d": b"5", "e": None, "f": [6]}, 1.0, {}),
        (Outcome(reward=0.25, metrics={"acc": 1.0}), 0.25, {"acc": 1.0}),
        (Outcome(reward=np.float32(1), metrics={"acc": np.float32(0.5), "n": True}), 1.0, {"acc": 0.5, "n": 1.0}),
    ],
)
def test_number_dict_and_outcome_are_results_of_an_episode(scripted, result, reward, metrics):
    async def episode(problem, session):
        return result

    outcome = run(scripted("x<|im_end|>"), episode).outcome
    assert (outcome.status, outcome.reward, outcome.metrics) == ("ok", reward, metrics)
    assert all(type(value) is float for value in outcome.metrics.values())  # others would become text in JSON


@pytest.mark.parametrize("is_async", [True, False])
def test_episode_that_changes_its_problem_changes_it_for_no_other(scripted, is_async):
    problem = Problem(id="0-0", prompt=[{"role": "user", "content": "a"}], extra_info={"tests": ["b"]})

    def change(problem, session):
        problem.prompt.append({"role": "user", "content": "c"})
        return float(len(problem.prompt) + len(problem.extra_info.pop("tests")))

    async def change_async(problem, session):
        return change(problem, session)

    policy = scripted()

    async def twice():
        function = change_async if is_async else change
        return [await run_episode(function, problem, policy.session(str(number))) for number in range(2)]

    assert [result.outcome.reward for result in asyncio.run(twice())] == [3.0, 3.0]
    assert problem.extra_info == {"tests": ["b"]}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "must return a number, .* got None"),
        ("1.0", "must return a number, .* got '1.0'"),
        (float("nan"), "expected a finite float32 as the reward of an episode, got nan"),
        (1e300, r"expected a finite float32 as the reward of an episode, got 1e\+300"),
        ({"acc": 1.0}, "requires the key \"score\", got {'acc': 1.0}"),
        ({"score": None}, "must return a number, .* got None"),
        ({"score": torch.ones(2)}, r"must return a number, .* got tensor\(\[1., 1.\]\)"),
        ({"score": 1.0, "n": torch.tensor(float("nan"))}, "finite float32 as the metric 'n' of an episode, got nan"),
        ({"score": 1.0, "acc": float("inf")}, "finite float32 as the metric 'acc'"),
        ({"score": 1.0, "acc": "yes"}, "\"acc\" of a dict .* must be a number, got 'yes'"),
        (object(), "must return a number, .* got <object"),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
def test_result_that_is_no_finite_number_is_an_environment_error(scripted, result, message, is_async):
    async def coroutine(problem, session):
        return result

    def function(problem, session):
        return result

    outcome = run(scripted("x<|im_end|>"), coroutine if is_async else function).outcome
    assert (outcome.status, outcome.reward, outcome.is_trainable) == ("environment_error", 0.0, False)
    assert re.search(message, outcome.reason)
    assert "test_result_that" in outcome.reason  # the function's name


def test_outcome_with_unknown_status_or_wrong_types_is_refused():
    with pytest.raises(ValueError, match=r"must be one of .*'ok'.*, got 'done'"):
        Outcome(reward=1.0, status="done")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the reason of an outcome must be text, got KeyError"):
        Outcome(reward=0.0, status="environment_error", reason=KeyError("x"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must return a number"):
        Outcome(reward="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the metric 'acc' of an episode must be a number, got 'high'"):
        Outcome(reward=1.0, metrics={"acc": "high"})  # type: ignore[dict-item]


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("action", "status", "reason"),
    [
        (lambda: 1 / 0, "environment_error", r"^ZeroDivisionError: division by zero \(in test_episode.py:\d+\)$"),
        (lambda: exit(3), "environment_error", r"^SystemExit: 3 \(in "),
        (lambda: json.loads("{"), "environment_error", r"^JSONDecodeError: .* \(in test_episode.py:\d+\)$"),
        (lambda: next(iter([])), "environment_error", "StopIteration"),
        (lambda: _raise(TimeoutError("database")), "environment_error", "^TimeoutError: database"),
        (lambda: _raise(asyncio.CancelledError("mine")), "environment_error", "^CancelledError: mine"),
        (lambda: _raise(EngineError("gone")), "environment_error", "^EngineError: gone"),
        (lambda: _raise(ModelError("no answer")), "model_error", "^model: no answer$"),
        (lambda: _raise(LimitError("turns", "too many")), "truncated", "^turns: too many$"),
        (lambda: _raise(ValueError("x" * 10_000)), "environment_error", r"^ValueError: x{1900,2000} \(in "),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
def test_error_of_an_episode_becomes_its_outcome_and_affects_no_other(scripted, action, status, reason, is_async):
    async def coroutine(problem, session):
        await session.generate(text="hello")
        return action()

    def function(problem, session):
        session.generate(text="hello")
        return action()

    policy = scripted("x<|im_end|>")

    async def both():
        return await asyncio.gather(
            policy.run(coroutine if is_async else function, PROBLEM),
            policy.run(asks, PROBLEM),
            policy.run(asks, PROBLEM),
        )

    failed, *others = asyncio.run(both())
    assert failed.outcome.status == status
    assert re.search(reason, failed.outcome.reason)
    assert len(failed.trajectories) == 1
    assert [other.outcome.status for other in others] == ["ok", "ok"]


def test_episode_that_cancels_its_own_task_is_an_environment_error(scripted):
    async def episode(problem, session):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    outcome = run(scripted("x<|im_end|>"), episode).outcome
    assert (outcome.status, outcome.reason.partition(":")[0]) == ("environment_error", "CancelledError")


def test_errors_of_a_task_group_are_classified_by_their_causes(scripted):
    def episode(*errors):
        async def run_group(problem, session):
            raise BaseExceptionGroup("group", [ExceptionGroup("inner", [errors[0]]), *errors[1:]])

        return run_group

    policy = scripted("x<|im_end|>")
    limit, model = LimitError("length", "full"), ModelError("bad")
    assert run(policy, episode(limit, limit)).outcome.status == "truncated"
    assert run(policy, episode(limit, model)).outcome.status == "model_error"
    outcome = run(policy, episode(limit, KeyError("k"), model)).outcome
    assert outcome.status == "environment_error"
    assert outcome.reason.startswith("KeyError: 'k'")


def test_context_limit_in_a_child_task_truncates_the_episode(scripted):
    async def episode(problem, session):
        async with asyncio.TaskGroup() as group:
            group.create_task(session.generate(token_ids=[5] * 20))

    result = run(scripted("x<|im_end|>", config=SessionConfig(context_length=20)), episode)
    assert result.outcome.status == "truncated"
    assert result.outcome.reason.startswith("length: ")


@pytest.mark.parametrize(("stands_still", "status"), [(True, "ok"), (False, "truncated")])
def test_time_limit_is_measured_by_the_clock(scripted, stands_still, status):
    async def episode(problem, session):
        await asyncio.sleep(0.5)
        return 1.0

    def clock():
        return 0.0 if stands_still else time.monotonic()

    async def limited():
        session = scripted("x<|im_end|>").session("limited")
        return await run_episode(episode, PROBLEM, session, timeout_s=0.1, clock=clock)

    result = asyncio.run(limited())
    assert result.outcome.status == status
    assert (result.seconds == 0.0) is stands_still


@pytest.mark.parametrize("is_async", [True, False])
def test_error_after_a_limit_that_the_episode_has_handled_is_an_environment_error(scripted, is_async):
    async def coroutine(problem, session):
        with suppress(LimitError):
            await session.generate(token_ids=[5] * 20)
        raise ConnectionError("the judge does not reply")

    def function(problem, session):
        with suppress(LimitError):
            session.generate(token_ids=[5] * 20)
        raise ConnectionError("the judge does not reply")

    policy = scripted("x<|im_end|>", config=SessionConfig(context_length=20))
    outcome = run(policy, coroutine if is_async else function).outcome
    assert outcome.status == "environment_error"
    assert outcome.reason.startswith("ConnectionError: the judge does not reply")


@pytest.mark.parametrize(("raised", "status"), [(ValueError, "truncated"), (ModelError, "model_error")])
def test_error_that_is_raised_from_a_limit_is_truncated_unless_it_is_the_model_s(scripted, raised, status):
    async def episode(problem, session):
        try:
            await session.generate(token_ids=[5] * 20)
        except LimitError as error:
            raise raised("no room") from error

    policy = scripted("x<|im_end|>", config=SessionConfig(context_length=20))
    assert run(policy, episode).outcome.status == status


def test_partial_and_object_with_async_call_are_async_episodes(scripted):
    class Agent:
        async def __call__(self, problem, session):
            await session.generate(text="hello")
            return 1.0

    async def with_option(option, problem, session):
        await session.generate(text="hello")
        return option

    policy = scripted("x<|im_end|>")
    assert run(policy, Agent()).outcome.status == "ok"
    assert run(policy, functools.partial(with_option, 0.5)).outcome.reward == 0.5


def test_episode_without_async_has_branches_and_the_session_seed(scripted):
    def episode(problem, session):
        assert threading.current_thread() is not threading.main_thread()
        first = session.generate(text="hello")
        session.branch("critic", is_trained=False).generate(text="hello")
        return {"score": len(first.token_ids), "seed": session.seed}

    result = asyncio.run(scripted("x<|im_end|>").run(episode, PROBLEM, seed=3))
    assert (result.outcome.reward, result.outcome.metrics) == (2.0, {"seed": 3.0})
    assert [row.branch for row in result.trajectories] == ["main"]


def test_sleeping_episodes_without_async_run_at_the_same_time(scripted):
    barrier = threading.Barrier(100)

    def meets(problem, session):
        barrier.wait(timeout=60)
        time.sleep(0.001)
        return 1.0

    async def many():
        policy = scripted("x<|im_end|>")
        return await asyncio.gather(*(policy.run(meets, PROBLEM) for _ in range(100)))

    assert {result.outcome.status for result in asyncio.run(many())} == {"ok"}


def test_episode_is_found_by_registered_name_module_and_file(tmp_path):
    @register_episode("test-registered")
    async def registered(problem, session):
        return 1.0

    assert load_episode("test-registered") is registered
    with pytest.raises(ValueError, match="'test-registered' is registered already"):
        register_episode("test-registered")(registered)
    (tmp_path / "env.py").write_text(
        "from tidemill_rollout import register_episode\n"
        "@register_episode('test-file')\ndef episode(problem, session):\n    return 1.0\n"
    )
    found = load_episode(f"{tmp_path}/env.py:episode")
    assert load_episode(f"{tmp_path}/env.py:episode") is found  # imported once
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "env.py").write_text("def episode(problem, session):\n    return 2.0\n")
    assert load_episode(f"{tmp_path}/other/env.py:episode") is not found


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("unknown", ValueError, r'expected a registered episode \(.*\), "pkg.mod:attr" or "path/file.py:attr"'),
        ("missing.py:episode", ValueError, "missing.py does not exist"),
        ("tidemill_rollout.nothing:episode", ImportError, "cannot import 'tidemill_rollout.nothing'"),
        ("tidemill_rollout:nothing", ValueError, "has no function 'nothing'"),
        ("{tmp}/broken.py:episode", ImportError, "SystemExit: 1"),
    ],
)
def test_episode_that_does_not_exist_is_refused_with_its_name(tmp_path, name, error, message):
    (tmp_path / "broken.py").write_text("exit(1)")
    for _ in range(2):
        with pytest.raises(error, match=message):
            load_episode(name.format(tmp=tmp_path))
