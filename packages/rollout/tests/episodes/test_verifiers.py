"""A taskset of the package verifiers, in a virtual environment of its own."""

import asyncio
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from tidemill_rollout import Endpoint, Problem
from tidemill_rollout.episodes import single_turn
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


def test_taskset_has_the_tokens_and_rewards_of_the_same_task_in_this_process(scripted, python, tmp_path):
    (tmp_path / "sums.py").write_text(TASKSET)
    episode = verifiers_environment(python, {"id": "sums"}, env={"PYTHONPATH": str(tmp_path)})

    def exact(data_source, solution_str, ground_truth, extra_info):
        return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

    problem = Problem(
        prompt=[{"role": "user", "content": "what is 2 + 40"}], ground_truth="42", extra_info={"index": 2}
    )

    async def run():
        async with Endpoint() as endpoint:
            policy = scripted("42<|im_end|>", endpoint=endpoint)
            here = await policy.run(single_turn(exact), problem, seed=5)
            there = await policy.run(episode, problem, seed=5)
            missing = await policy.run(episode, replace(problem, extra_info={"index": 9}))
            return policy, here, there, missing

    policy, here, there, missing = asyncio.run(run())
    assert there.outcome == here.outcome, there.outcome.reason
    assert there.outcome.reward == 1.0
    assert there.trajectories == here.trajectories
    assert policy.engine.requests[0] == policy.engine.requests[1]
    assert missing.outcome.status == "environment_error"
    assert "the taskset {'id': 'sums'} has no task 9" in missing.outcome.reason
