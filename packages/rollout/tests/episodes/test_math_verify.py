"""The reward function MathVerify and its process."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from tidemill_rollout import Problem
from tidemill_rollout.episodes import single_turn

pytest.importorskip("math_verify")
from tidemill_rollout.episodes.math_verify import MathVerify


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerify()
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("ground_truth", "text", "score"),
    [
        ("1/2", r"so it is \boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"the answer is $\frac{2}{4}$", 1.0),
        ("x^2+1", "$1 + x^2$", 1.0),
        (r"$\sqrt{2}$", r"$\sqrt 2$", 1.0),
        (42, "so it is 42.", 1.0),
        ("42", "so it is 41.", 0.0),
        ("42", "no idea", 0.0),
        ("42", "\ud800 half of a pair", 0.0),
        ("42", "", 0.0),
    ],
)
def test_answers_that_are_equal_mathematically_score_1(verifier, ground_truth, text, score):
    assert verifier("math", text, ground_truth, None) == score


def test_ground_truth_without_mathematics_is_an_environment_error(verifier, scripted):
    problem = Problem(prompt="hello", ground_truth="")
    outcome = asyncio.run(scripted("42<|im_end|>").run(single_turn(verifier), problem)).outcome
    assert outcome.status == "environment_error"
    assert outcome.reason.startswith("ValueError: math-verify cannot parse the ground truth ''")


def test_many_threads_share_the_process(verifier):
    def score(number):
        return verifier("math", f"$\\boxed{{{number}}}$", number - number % 2, None)

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(score, range(20))) == [1.0, 0.0] * 10


def test_process_is_replaced_after_a_timeout_and_only_that_answer_fails(verifier):
    assert verifier("math", "1", "1", None) == 1.0
    process = verifier._process
    os.kill(process.pid, signal.SIGSTOP)
    verifier._timeout_s, limit = 0.1, verifier._timeout_s
    with pytest.raises(RuntimeError, match=r"returned no result within 0.1 s; a new one serves the next answer"):
        verifier("math", "1", "1", None)
    verifier._timeout_s = limit
    assert process.poll() is not None
    assert verifier("math", "1", "1", None) == 1.0


def test_process_that_crashed_between_answers_is_replaced(verifier):
    assert verifier("math", "1", "1", None) == 1.0
    verifier._process.kill()
    verifier._process.wait()
    assert verifier("math", "1", "1", None) == 1.0


def test_process_that_crashes_during_an_answer_fails_that_answer(verifier, monkeypatch):
    verifier.close()
    worker = "import sys, os\nprint('ready', flush=True)\nsys.stdin.readline()\nos._exit(3)"
    monkeypatch.setattr("tidemill_rollout.episodes.math_verify._WORKER", worker)
    with pytest.raises(RuntimeError, match="crashed with exit code 3"):
        verifier("math", "1", "1", None)
    monkeypatch.undo()
    assert verifier("math", "1", "1", None) == 1.0
