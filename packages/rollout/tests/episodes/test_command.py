"""Commands as episodes: reward, errors, output, time limit, and an agent with an interpreter of its own."""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

import pytest
from tidemill_rollout import Endpoint, Policy, Problem, SessionConfig
from tidemill_rollout.episodes.command import command

PROBLEM = Problem(prompt=[{"role": "user", "content": "hello"}], ordinal=3, ground_truth="42", extra_info={"level": 1})
# Without packages, so that it runs in any interpreter.
ASK = """
import json, os, sys, urllib.request

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

problem = json.loads(sys.stdin.readline())
"""


def run_together(policy, *episodes, timeout_s=float("inf")):
    async def serve():
        async with Endpoint() as endpoint:
            policy.endpoint = endpoint
            return await asyncio.gather(
                *(policy.run(episode, PROBLEM, seed=5, timeout_s=timeout_s) for episode in episodes)
            )

    return asyncio.run(serve())


def python(code, **options):
    return command([sys.executable, "-S", "-c", code], **options)


def run(policy, code, *, timeout_s=float("inf"), **options):
    return run_together(policy, python(code, **options), timeout_s=timeout_s)[0]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_stopped(pid):
    while is_running(pid):
        time.sleep(0.01)


def test_command_receives_problem_and_seed_and_its_last_line_is_the_reward(scripted, tmp_path):
    code = (
        "import json, os, sys\nproblem = json.loads(sys.stdin.readline())\nprint('working')\n"
        "assert problem['ordinal'] == 3 and problem['ground_truth'] == '42' and problem['extra_info'] == {'level': 1}\n"
        "assert os.environ['TIDEMILL_SEED'] == '5' and os.environ['MODE'] == 'fast' and os.path.exists('here')\n"
        "print(json.dumps({'score': 0.5, 'acc': 1}))"
    )
    (tmp_path / "here").touch()
    outcome = run(scripted("x<|im_end|>"), code, cwd=tmp_path, env={"MODE": "fast"}).outcome
    assert (outcome.status, outcome.reason, outcome.reward, outcome.metrics) == ("ok", "", 0.5, {"acc": 1.0})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise KeyError('x')", r"^RuntimeError: \S+python\S* failed with exit code 1: .*KeyError: 'x'"),
        ("import os; os.abort()", "failed with exit code -6: "),
        ("print('done')", "expected a number or an object with \"score\" in the last line .*, got 'done'"),
        ("print(float('nan'))", "got 'nan'|finite"),
        ("print('{\"acc\": 1}')", "got '{\"acc\": 1}'"),
        ("import sys; print('lost', file=sys.stderr)", r"got ''; stderr: 'lost'"),
    ],
)
def test_command_that_fails_or_prints_no_reward_is_an_environment_error(scripted, code, message):
    outcome = run(scripted("x<|im_end|>"), code).outcome
    assert outcome.status == "environment_error"
    assert re.search(message, outcome.reason, re.DOTALL), outcome.reason


def test_program_that_does_not_exist_is_an_environment_error(scripted):
    (result,) = run_together(scripted("x<|im_end|>"), command(["/nowhere/python"]))
    assert result.outcome.reason.startswith("RuntimeError: cannot run '/nowhere/python' in /")
    assert "No such file or directory" in result.outcome.reason


def test_command_without_an_endpoint_is_refused(scripted):
    outcome = asyncio.run(scripted("x<|im_end|>").run(python("print(1)"), PROBLEM)).outcome
    assert "a command needs an endpoint; create the policy with Policy(..., endpoint=endpoint)" in outcome.reason


def test_output_of_any_size_is_read_and_only_its_end_is_kept(scripted):
    code = (
        "import sys\nfor _ in range(256):\n    sys.stdout.write('x' * 2**20)\n    sys.stderr.write('y' * 2**18)\n"
        "print()\nprint(1.0)"
    )
    before = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    assert run(scripted("x<|im_end|>"), code).outcome.reward == 1.0
    after = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    assert after - before < 64 * 1024  # KiB; the command writes 320 MiB


FORK = (
    "import os, time\n"
    "if os.fork() == 0:\n    open('child', 'w').write(str(os.getpid()))\n    time.sleep(1000)\n"
    "while not (os.path.exists('child') and open('child').read()): time.sleep(0.01)\n"
)


@pytest.mark.parametrize(("last", "status"), [("print(1.0)", "ok"), ("raise SystemExit(3)", "environment_error")])
def test_processes_that_the_command_started_are_killed_at_its_end(scripted, tmp_path, last, status):
    result = run(scripted("x<|im_end|>"), FORK + last, cwd=tmp_path)
    assert result.outcome.status == status
    wait_until_stopped(int((tmp_path / "child").read_text()))


def test_time_limit_and_cancellation_kill_all_processes_of_the_command(scripted, tmp_path):
    code = FORK + "open('pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)"

    async def cancel():
        async with Endpoint() as endpoint:
            policy: Policy = scripted("x<|im_end|>", endpoint=endpoint)
            task = asyncio.create_task(policy.run(python(code, cwd=tmp_path), PROBLEM))
            while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await policy.run(python("import time; time.sleep(1000)"), PROBLEM, timeout_s=0.1)

    assert asyncio.run(cancel()).outcome.reason == "time: no result within 0.1 s"
    wait_until_stopped(int((tmp_path / "child").read_text()))
    wait_until_stopped(int((tmp_path / "pid").read_text()))


def test_process_that_left_the_group_does_not_delay_the_end_of_the_episode(scripted, tmp_path):
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n    open('pid', 'w').write(str(os.getpid()))\n    time.sleep(1000)\n"
        "while not (os.path.exists('pid') and open('pid').read()): time.sleep(0.01)\nprint(1.0)"
    )
    try:
        assert run(scripted("x<|im_end|>"), code, cwd=tmp_path, timeout_s=60.0).outcome.status == "ok"
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)


def test_commands_at_the_same_time_have_sessions_of_their_own(scripted):
    code = ASK + "print(sum(ask(problem['prompt'])['content'] == '42' for _ in range(3)))"
    results = run_together(scripted("42<|im_end|>"), *[python(code)] * 8)
    assert [result.outcome.reward for result in results] == [3.0] * 8
    assert [result.metrics["num_turns"] for result in results] == [3.0] * 8


def test_context_limit_in_a_command_truncates_the_episode(scripted):
    policy = scripted("42<|im_end|>", config=SessionConfig(context_length=10))
    outcome = run(policy, ASK + "ask(problem['prompt'])").outcome
    assert outcome.status == "truncated"
    assert outcome.reason.startswith("length: ")


def test_openai_client_in_an_interpreter_of_its_own(scripted, interpreter, tmp_path):
    (tmp_path / "agent.py").write_text(
        "import json, sys, openai\n"
        "problem = json.loads(sys.stdin.readline())\n"
        "messages = problem['prompt']\n"
        "for _ in range(2):\n"
        "    reply = openai.OpenAI().chat.completions.create(model='policy', messages=messages).choices[0].message\n"
        "    messages += [{'role': 'assistant', 'content': reply.content}, {'role': 'user', 'content': 'again'}]\n"
        f"assert sys.prefix == {str(interpreter.parents[1])!r}, sys.prefix\n"
        "print(float(reply.content == problem['ground_truth']))\n"
    )
    episode = command([str(interpreter), "agent.py"], cwd=tmp_path)
    (result,) = run_together(scripted("hello<|im_end|>", "42<|im_end|>"), episode)
    assert (result.outcome.status, result.outcome.reward) == ("ok", 1.0), result.outcome
    assert len(result.trajectories) == 1
    assert result.metrics["num_turns"] == 2.0
