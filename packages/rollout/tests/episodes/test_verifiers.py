"""A taskset of the package verifiers, in a virtual environment of its own."""

import asyncio
import shutil
import subprocess
import sys
from dataclasses import replace

import five_ways
import pytest
from tidemill_rollout import Endpoint
from tidemill_rollout.episodes.verifiers import verifiers_environment

pytestmark = pytest.mark.slow  # installs verifiers

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield Sum(Data(prompt=f"what is {number} + 40", answer=str(number + 40)), self.config.task)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Interpreter of a virtual environment with verifiers."""
    folder = tmp_path_factory.mktemp("verifiers")
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is required to create the virtual environment of verifiers")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(folder / "venv")], check=True)
    interpreter = folder / "venv" / "bin" / "python"
    install = [uv, "pip", "install", "-q", "--python", str(interpreter), "verifiers==0.4.0"]
    result = subprocess.run(install, capture_output=True, text=True)
    if "error sending request" in result.stderr or "dns error" in result.stderr:
        pytest.skip(f"the package index cannot be reached: {result.stderr[-200:]}")
    assert result.returncode == 0, result.stderr
    return interpreter


@pytest.fixture
def sums(python, tmp_path):
    """The episode of the taskset."""
    (tmp_path / "sums.py").write_text(TASKSET)
    return verifiers_environment(python, {"id": "sums"}, env={"PYTHONPATH": str(tmp_path)})


def test_same_task_written_five_ways_has_the_same_tokens_masks_and_rewards(tokenizer, python, sums):
    episodes = five_ways.ways(python) | {"verifiers": sums}
    assert len(episodes) == 5
    five_ways.assert_equal(five_ways.run(tokenizer, episodes))


def test_metrics_of_the_task_are_those_of_the_outcome_and_a_missing_task_is_an_environment_error(scripted, sums):
    async def run():
        async with Endpoint() as endpoint:
            policy = scripted("42<|im_end|>", endpoint=endpoint)
            missing = replace(five_ways.PROBLEM, extra_info={"index": 9})
            return await asyncio.gather(policy.run(sums, five_ways.PROBLEM), policy.run(sums, missing))

    found, missing = asyncio.run(run())
    assert (found.outcome.status, found.outcome.metrics) == ("ok", {"length": 2.0}), found.outcome.reason
    assert missing.outcome.status == "environment_error"
    assert "the taskset {'id': 'sums'} has no task 9" in missing.outcome.reason
