"""The command as a user runs it: it learns, it is stopped, it is continued, its parts die."""

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tidemill_trainer.demo import write_assets

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.sglang, pytest.mark.timeout(900)]

_SMALL = (
    "data.train_batch_size=8",
    "rollout.n=4",
    "warmup.max_steps=0",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
)
_REWARDS = """
def right_digits(data_source, solution_str, ground_truth, extra_info):
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / 3
"""
_BACKENDS = {"fsdp2": (), "megatron": ("engine.backend=megatron", "engine.tp=2")}
_TIMES = (
    "timing_s/",
    *(f"perf/{name}" for name in ("time_per_step", "throughput", "tokens_per_s", "tflops", "mfu", "max_memory")),
    "weight_update/seconds",
    "weight_update/gb_per_s",
)
# Made once for all runs of a user, by libraries that SGLang imports.
_CACHES = {f"torchinductor_{getpass.getuser()}", getpass.getuser()}


class Command:
    """`tidemill ...` in a process group of its own, as in a terminal, and everything that it started."""

    def __init__(self, *args: str, after: "Command | None" = None) -> None:
        """`after`: a command that was killed, whose leftovers this one finds and has to remove."""
        self.shared_before = set(os.listdir("/dev/shm")) if after is None else after.shared_before
        self.temporary = tempfile.TemporaryDirectory() if after is None else after.temporary
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tidemill_trainer", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # Ray would put its sockets there as well, with paths that are too long.
            env=os.environ | {"TMPDIR": self.temporary.name, "RAY_TMPDIR": tempfile.gettempdir()},
        )
        self.output = ""
        self.started: set[psutil.Process] = set()

    def kill(self) -> None:
        """For a test that failed: nothing of it may go on."""
        if self.process.poll() is None:
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                process.kill()
            self.process.wait()
        self.temporary.cleanup()

    def wait_for(self, pattern: str, timeout_s: float = 240) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        for line in self.process.stdout:
            self.output += line
            if re.search(pattern, line):
                self.started = set(psutil.Process(self.process.pid).children(recursive=True))
                return
            assert time.monotonic() < deadline, self.output
        raise AssertionError(f"the command ended before {pattern!r}:\n{self.output}")

    def find(self, name: str, timeout_s: float = 10) -> psutil.Process:
        """The process whose title has `name` in it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.started |= set(psutil.Process(self.process.pid).children(recursive=True))
            for process in self.started:
                if name in _title(process):
                    return process
            time.sleep(0.2)
        raise AssertionError(f"no {name} among {sorted(map(_title, self.started))}")

    def end(self, timeout_s: float = 120) -> int:
        """Waits for the end; nothing may be left. Returns the exit status."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.output += rest
        _, alive = psutil.wait_procs(self.started, timeout=15)
        assert not alive, [process.cmdline() for process in alive]
        left = [path for path in Path("/dev/shm").iterdir() if path.name not in self.shared_before]
        mapped = _mapped_inodes()
        assert [path for path in left if path.exists() and path.stat().st_ino not in mapped] == []
        files = [path for path in Path(self.temporary.name).rglob("*") if not path.is_dir()]
        folders = {path.name for path in Path(self.temporary.name).iterdir()}
        assert files == []
        assert folders <= _CACHES
        return self.process.returncode


def _mapped_inodes() -> set[int]:
    """Of the files in /dev/shm that processes have mapped: of those that run, none is the command's."""
    inodes: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            inodes.update(int(line.split()[4]) for line in maps.read_text().splitlines() if " /dev/shm/" in line)
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended, or is of another user
            continue
    return inodes


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "(ended)"


@pytest.fixture
def start():
    commands: list[Command] = []

    def start(*args: str, after: Command | None = None) -> Command:
        commands.append(Command(*args, after=after))
        return commands[-1]

    yield start
    for command in commands:
        command.kill()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    assets = write_assets(folder / "assets")
    from tidemill_trainer.cli import DEMO_CONFIG

    return ["train", str(DEMO_CONFIG), *assets, *_SMALL, f"trainer.run_dir={folder / 'runs'}"]


def _steps(run: Path) -> dict[int, dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if row["step"] > 0}


def _run_dir(recipe) -> Path:
    return Path(recipe[-1].removeprefix("trainer.run_dir="))


@pytest.mark.parametrize(
    ("number", "backend"), [(signal.SIGINT, "fsdp2"), (signal.SIGTERM, "fsdp2"), (signal.SIGINT, "megatron")]
)
def test_a_signal_ends_everything_and_resume_continues(start, recipe, ctrl_c, number, backend):
    name = f"stopped-{number}-{backend}"
    args = [*recipe, *_BACKENDS[backend], f"trainer.name={name}", "trainer.save_freq=2", "trainer.total_steps=500"]
    command = start(*args)
    command.wait_for(r"rl +5 ")
    if number == signal.SIGINT:  # a terminal sends it to the whole process group
        os.killpg(command.process.pid, number)
    else:
        command.process.terminate()
    assert command.end() == 130
    assert re.search(r"stopped\. The run is in .* from its checkpoint of step \d+ with: tidemill train", command.output)
    run = _run_dir(recipe) / name
    done = max(_steps(run))
    resumed = start("train", str(run / "config.toml"), f"trainer.total_steps={done + 2}", "--resume")
    resumed.wait_for(r"continuing after step \d+")
    assert resumed.end() == 0
    assert sorted(_steps(run)) == list(range(1, done + 3))


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_fresh_processes_continue_bit_for_bit(start, recipe, backend):
    """8 steps equal 4 steps, and 4 more of processes that knew nothing of the first ones but the checkpoint.

    The former hand the engine weights where they are, the latter copies of weights that are away, as gradients and the
    optimizer's state are.
    """
    rewards = _run_dir(recipe).parent / "rewards.py"
    rewards.write_text(_REWARDS)  # the model is not warmed up: exact matches would be too rare to learn anything
    args = [*recipe, *_BACKENDS[backend], f"reward.function={rewards}:right_digits"]
    args += ["actor.ppo_mini_batch_size=4", "trainer.test_freq=4"]
    away = [f"engine.{what}_offload=true" for what in ("param", "grad", "optimizer")]
    whole, halves = _run_dir(recipe) / f"whole-{backend}", _run_dir(recipe) / f"halves-{backend}"
    for command in (
        [f"trainer.name={whole.name}", "trainer.total_steps=8"],
        [f"trainer.name={halves.name}", "trainer.total_steps=4", *away],
        [f"trainer.name={halves.name}", "trainer.total_steps=8", *away, "--resume"],
    ):
        assert start(*args, *command).end(timeout_s=240) == 0
    expected, steps = _steps(whole), _steps(halves)
    assert sorted(steps) == sorted(expected) == list(range(1, 9))
    for step, row in expected.items():
        assert row["actor/grad_norm"] > 0
        for name, value in row.items():
            if not name.startswith(_TIMES):
                assert steps[step][name] == value, (step, name)
    weights = [
        load_file(run / "checkpoints" / "step_000008" / "huggingface" / "model.safetensors") for run in (whole, halves)
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name


@pytest.mark.parametrize(
    ("victim", "message"),
    [("sglang::scheduler", "rollout"), ("ray::ActorWorker", "rank 0 of group 'actor'|rank 1 of group 'actor'")],
)
def test_a_killed_process_ends_the_run_with_one_message(start, recipe, victim, message):
    command = start(*recipe, f"trainer.name={victim.replace(':', '')}", "trainer.total_steps=500")
    command.wait_for(r"rl +2 ")
    command.find(victim).kill()
    assert command.end() == 1
    _check_one_error(command, message)
    assert "no checkpoint to continue from (trainer.save_freq makes them)" in command.output


def test_a_port_that_is_taken_ends_the_start_with_one_message(start, recipe):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = start(*recipe, "trainer.name=port", f"rollout.engine_args.nccl_port={port}")
        command.wait_for("starting Ray")
        command.find("sglang::scheduler", timeout_s=240)  # and all others with it, for end() to look for
        assert command.end() == 1
    _check_one_error(command, r"rank 0 of group 'rollout' .* died during 'start_engine'")
    assert re.search(rf"port: {port}.*EADDRINUSE", command.output)


def test_an_engine_that_is_killed_while_it_starts_leaves_nothing(start, recipe):
    command = start(*recipe, "trainer.name=killed-start")
    command.wait_for("starting Ray")
    actor = command.find("ray::RolloutWorker")
    _wait_for_shared_memory(command)
    actor.kill()
    assert command.end() == 1
    _check_one_error(command, r"rank 0 of group 'rollout' .* died during 'start_engine'")


def test_next_start_removes_what_a_killed_command_left(start, recipe):
    command = start(*recipe, "trainer.name=killed")
    command.wait_for("starting Ray")
    _wait_for_shared_memory(command)
    command.process.kill()
    _, alive = psutil.wait_procs(command.started, timeout=60)
    assert not alive, sorted(map(_title, alive))
    assert list(Path(command.temporary.name).glob("tidemill-run-*"))
    assert _engine_memory(command)
    following = start(*recipe, "trainer.name=following", "trainer.total_steps=1", after=command)
    following.wait_for(r"rl +1 ")
    assert following.end() == 0
    assert not _engine_memory(command)


def _engine_memory(command: Command) -> set[str]:
    made = set(os.listdir("/dev/shm")) - command.shared_before
    return {name for name in made if name.startswith("sglang_loads_tidemill-run-")}


def _wait_for_shared_memory(command: Command) -> None:
    deadline = time.monotonic() + 240
    while not _engine_memory(command):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    command.find("sglang::scheduler")


def _check_one_error(command: Command, message: str) -> None:
    errors = [line for line in command.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, command.output
    assert re.search(message, command.output), command.output
    assert "Traceback" not in command.output


def test_shuffled_rewards_do_not_learn(start, tmp_path):
    common = ["demo", f"trainer.run_dir={tmp_path}", "trainer.total_steps=60", "trainer.test_freq=60"]
    accuracy = {}
    for name, flags in (("real", []), ("shuffled", ["--shuffle-rewards"])):
        command = start(*common, f"trainer.name={name}", *flags)
        command.wait_for(r"rl +1 ")
        assert command.end(timeout_s=400) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        tested = [(row["step"], row["val/accuracy"]) for row in rows if "val/accuracy" in row]
        accuracy[name] = tested[-1][1] - [value for step, value in tested if step == 0][-1]
    assert accuracy["real"] > 0.1
    assert accuracy["shuffled"] < 0.05


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_the_demo_reaches_its_goal(start, tmp_path, backend):
    command = start("demo", *_BACKENDS[backend], f"trainer.run_dir={tmp_path}", "trainer.name=demo")
    command.wait_for(r"rl +1 ")
    assert command.end(timeout_s=600) == 0
    steps = _steps(tmp_path / "demo")
    before, after = map(float, re.findall(r"held-out accuracy went from (\d\.\d+) to (\d\.\d+)", command.output)[0])
    assert 0.2 <= before <= 0.6
    assert after >= 0.9
    assert abs(steps[1]["actor/ppo_kl"]) < 1e-6  # the first step is on policy
    assert steps[1]["actor/pg_clipfrac"] == 0.0
    assert all(row["rollout/log_prob_abs_diff/mean"] < 1e-4 for row in steps.values())
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000
