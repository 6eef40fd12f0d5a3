"""The command `tidemill` as a user runs it: it stops, resumes, and survives killed processes."""

import os
import random
import re
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from command_process import BACKENDS, Command, partial_rewards, run_dir, title
from safetensors.torch import load_file
from step_metrics import TIMES, read_steps
from tidemill_trainer.batch_record import BatchRecord
from tidemill_trainer.config_file import load_config
from tidemill_trainer.data import PromptLoader, load_prompts
from tidemill_trainer.ledger import read_ledger, trained_problems
from tidemill_trainer.run_dir import RunDir
from transformers import AutoTokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("cluster"),
]


@pytest.mark.parametrize(
    ("number", "backend"), [(signal.SIGINT, "fsdp2"), (signal.SIGTERM, "fsdp2"), (signal.SIGINT, "megatron")]
)
def test_signal_stops_all_processes_and_resume_continues(start, recipe, ctrl_c, number, backend):
    name = f"stopped-{number}-{backend}"
    args = [*recipe, *BACKENDS[backend], f"trainer.name={name}", "trainer.save_freq=2", "trainer.total_steps=500"]
    command = start(*args)
    command.wait_for(r"rl +5 ")
    if number == signal.SIGINT:  # a terminal sends it to the whole process group
        os.killpg(command.process.pid, number)
    else:
        command.process.terminate()
    assert command.end() == 130
    assert re.search(r"stopped\. .* Continue from the checkpoint of step \d+ with: tidemill train", command.output)
    run = run_dir(recipe) / name
    done = max(read_steps(run))
    resumed = start("train", str(run / "config.toml"), f"trainer.total_steps={done + 2}", "--resume")
    resumed.wait_for(r"continuing after step \d+")
    assert resumed.end() == 0
    assert sorted(read_steps(run)) == list(range(1, done + 3))


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_resume_in_new_processes_is_bitwise_equal(start, recipe, backend):
    """A run of 8 steps equals a run of 4 steps that new processes continue for 4 steps from its checkpoint.

    The first run sends weights without a copy, the second one offloads weights, gradients and optimizer state.
    """
    args = [*recipe, *BACKENDS[backend], partial_rewards(recipe)]
    args += ["actor.ppo_mini_batch_size=4", "trainer.test_freq=4"]
    offload = [f"engine.{what}_offload=true" for what in ("param", "grad", "optimizer")]
    whole, halves = run_dir(recipe) / f"whole-{backend}", run_dir(recipe) / f"halves-{backend}"
    for command in (
        [f"trainer.name={whole.name}", "trainer.total_steps=8"],
        [f"trainer.name={halves.name}", "trainer.total_steps=4", *offload],
        [f"trainer.name={halves.name}", "trainer.total_steps=8", *offload, "--resume"],
    ):
        assert start(*args, *command).end(timeout_s=240) == 0
    expected, steps = read_steps(whole), read_steps(halves)
    assert sorted(steps) == sorted(expected) == list(range(1, 9))
    for step, row in expected.items():
        assert row["actor/grad_norm"] > 0
        for name, value in row.items():
            if not name.startswith(TIMES):
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
def test_killed_process_stops_the_run_with_one_error(start, recipe, victim, message):
    limits = ["rollout.max_restarts=0", "trainer.total_steps=500"]
    command = start(*recipe, f"trainer.name={victim.replace(':', '')}", *limits)
    command.wait_for(r"rl +2 ")
    command.find(victim).kill()
    assert command.end() == 1
    command.check_one_error(message)
    assert "before its first checkpoint. Start it again from the beginning with: tidemill train" in command.output


@pytest.mark.parametrize(("num_engines", "placement"), [(1, "separate"), (2, "separate"), (1, "turns"), (2, "turns")])
def test_killed_engine_is_started_again_and_the_run_continues(start, recipe, num_engines, placement):
    name = f"restarted-{num_engines}-{placement}"
    args = [f"trainer.name={name}", f"rollout.num_engines={num_engines}", f"placement.engines={placement}"]
    command = start(*recipe, *args, "trainer.total_steps=60")
    command.wait_for(r"rl +2 ")
    command.find("sglang::scheduler").kill()
    command.wait_for("rollout_[01] died and is started again")
    assert command.end(timeout_s=240) == 0
    steps = read_steps(run_dir(recipe) / name)
    assert sorted(steps) == list(range(1, 61))
    assert steps[60]["rollout/num_engine_restarts"] == 1


_LIMITS = (
    "actor.timeout_s=90",
    "engine.timeout_s=30",
    "weight_update.timeout_s=12",
    "episode.timeout_s=50",
    "trainer.total_steps=500",
)
_ENVIRONMENT = """
import sys
from tidemill_rollout.episodes.command import command
environment = command([sys.executable, "-c", "import time; time.sleep(5); print(1)  # environment"])
async def episode(problem, session):
    await session.generate(text=problem.prompt)
    return await environment(problem, session)
"""


@pytest.mark.parametrize(
    ("victim", "culprit"),
    [
        ("ray::ActorWorker", "rank [01] of group 'actor'"),
        ("ray::RolloutWorker", "rank 0 of group 'rollout_0'"),
        ("sglang::scheduler", "sglang::scheduler below rank 0 of group 'rollout_0'"),
    ],
)
def test_stopped_process_is_named_when_a_wait_expires(start, recipe, victim, culprit):
    name = f"stopped-{victim.replace(':', '')}"
    command = start(*recipe, *_LIMITS, f"trainer.name={name}")
    command.wait_for(r"rl +2 ")
    process = command.find(victim)
    process.suspend()
    assert command.end(timeout_s=300) == 1
    command.check_one_error(rf"waiting for .*; {culprit}, process {process.pid} on [^,]+, is stopped \(state T\)")
    report = (run_dir(recipe) / name / "logs" / "stall.txt").read_text()
    assert re.search(rf"== {culprit}, process {process.pid}, stopped \(state T\) \(py-spy\)\nThread ", report)


def test_stopped_episode_worker_is_named_and_replaced(start, recipe):
    command = start(*recipe, *_LIMITS, "trainer.name=stopped-episodes")
    command.wait_for(r"rl +2 ")
    process = command.find("ray::EpisodeWorker")
    process.suspend()
    command.wait_for(rf"episode worker 0, process {process.pid} on [^,]+, is stopped \(state T\)")
    command.wait_for(r"episode worker 0 did not respond for 60 s")
    command.wait_for(r"rl +\d+ ")  # the worker may have finished step 3 before it was stopped
    command.process.terminate()
    assert command.end() == 130


def test_stopped_environment_is_named_and_costs_only_its_episode(start, recipe):
    file = run_dir(recipe).parent / "environment.py"
    file.write_text(_ENVIRONMENT)
    command = start(*recipe, *_LIMITS, "trainer.name=stopped-env", f"episode.function={file}:episode")
    command.wait_for("starting SGLang and the training workers: ")
    process = command.find("# environment")
    process.suspend()
    command.wait_for(rf"# environment below episode worker 0, process {process.pid} on [^,]+, is stopped \(state T\)")
    command.wait_for(r"rl +1 ")
    command.process.terminate()
    assert command.end() == 130


def test_run_on_one_machine_listens_on_its_loopback_address_alone(start, recipe):
    command = start(*recipe, "trainer.name=listening")
    command.wait_for("starting SGLang and the training workers: ", timeout_s=600)
    processes = {process.pid: process for process in [psutil.Process(command.process.pid), *command.started]}
    listening = {
        (connection.laddr.ip.removeprefix("::ffff:"), title(processes[connection.pid]).partition(".")[0].rstrip())
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in processes
    }
    names = {name for _, name in listening}
    assert names >= {"ray::RolloutWorker", "ray::ActorWorker", "ray::EpisodeWorker", "sglang::scheduler"}, names
    assert {ip for ip, _ in listening} == {"127.0.0.1"}, sorted(listening)
    command.process.terminate()
    assert command.end() == 130


def test_doctor_compares_the_log_probs_of_engine_and_training(start, recipe):
    command = start("doctor", *recipe[1:], "--log-probs")
    command.wait_for(r"log-probs of engine and training: \d+ tokens differ by \d", timeout_s=600)
    command.wait_for("no problems found")
    assert command.end() == 0


def test_port_in_use_stops_the_start_with_one_error(start, recipe):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = start(*recipe, "trainer.name=port", f"rollout.engine_args.nccl_port={port}")
        command.wait_for("starting Ray")
        command.find("sglang::scheduler", timeout_s=240)  # end() checks all processes found so far
        assert command.end() == 1
    command.check_one_error(r"rank 0 of group 'rollout_0' .* died during 'start_engine'")
    assert re.search(rf"port: {port}.*EADDRINUSE", command.output)


def test_engine_killed_during_its_start_leaves_no_files(start, recipe):
    command = start(*recipe, "trainer.name=killed-start")
    command.wait_for("starting Ray")
    actor = command.find("ray::RolloutWorker")
    _wait_for_shared_memory(command)
    command.find("sglang::scheduler", timeout_s=240)
    actor.kill()
    assert command.end() == 1
    command.check_one_error(r"rank 0 of group 'rollout_0' .* died during 'start_engine'")


def test_next_start_removes_files_of_killed_command(start, recipe):
    command = start(*recipe, "trainer.name=killed")
    command.wait_for("starting Ray")
    _wait_for_shared_memory(command)
    command.find("ray::RolloutWorker")  # end() checks all processes found so far
    command.process.kill()
    _, alive = psutil.wait_procs(command.started, timeout=240)  # Ray's agents take over a minute to exit
    assert not alive, sorted(map(title, alive))
    leftovers = [*Path(command.temporary.name).glob("tidemill-run-*"), *_engine_memory(command)]
    assert leftovers  # the shared memory only if the engine did not finish its start before it died
    following = start(*recipe, "trainer.name=following", "trainer.total_steps=1", after=command)
    following.wait_for(r"rl +1 ")
    assert following.end() == 0
    assert not any(path.exists() for path in leftovers)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_killed_run_trains_the_problems_of_an_uninterrupted_run(start, recipe, max_staleness):
    # The save of step 4 waits for that of step 2: once step 4 is printed, there is a checkpoint.
    name, step = f"killed-later-{max_staleness}", random.randint(4, 12)
    bound = [f"rollout.max_staleness={max_staleness}", "algorithm.bypass_mode=true"]
    command = start(*recipe, *bound, f"trainer.name={name}", "trainer.save_freq=2", "trainer.total_steps=500")
    command.wait_for(rf"rl +{step} ")
    command.find("ray::RolloutWorker")  # end() checks all processes found so far
    command.process.kill()
    _, alive = psutil.wait_procs(command.started, timeout=240)
    assert not alive, sorted(map(title, alive))
    run = RunDir(run_dir(recipe) / name)
    last = max(line["step"] for line in read_ledger(run.ledger)) + 1
    resumed = start("train", str(run.config), f"trainer.total_steps={last}", "--resume", after=command)
    resumed.wait_for(r"continuing after step \d+")
    assert resumed.end() == 0
    config = load_config(run.config)
    problems, _ = load_prompts(config.data.train_files, AutoTokenizer.from_pretrained(config.model.path), config.data)
    loader = PromptLoader(problems, config.data.train_batch_size, config.trainer.seed)
    expected = Counter(int(row) for step in range(1, last + 1) for row in loader.rows(step))
    assert trained_problems(run.ledger) == {row: count * config.rollout.n for row, count in expected.items()}
    final = read_steps(run.path)[last]
    ended = sum(final[f"ledger/episodes/{kind}"] for kind in ("trained", "dropped", "failed", "undone"))
    assert ended == final["ledger/episodes/issued"]
    assert final["ledger/tokens/undone"] >= 0
    assert final["ledger/episodes/trained"] == last * config.data.train_batch_size * config.rollout.n


def test_replay_repeats_a_run_and_names_the_first_step_that_differs(start, recipe):
    """Replay starts from the initial model, because the run has no warm-up."""
    args = [*recipe, partial_rewards(recipe), "trainer.name=recorded", "trainer.total_steps=5"]
    args += ["rollout.max_staleness=1", "algorithm.bypass_mode=true", "trainer.save_batches=true"]
    assert start(*args).end(timeout_s=400) == 0
    run = run_dir(recipe) / "recorded"
    command = start("replay", str(run))
    assert command.end(timeout_s=400) == 0
    assert re.findall(r"step (\d+): equal", command.output) == ["1", "2", "3", "4", "5"]
    assert "sglang" not in " ".join(map(title, command.started))
    command = start("replay", str(run), "--generation")
    assert command.end(timeout_s=400) == 0
    assert re.findall(r"version (\d+): equal", command.output) == ["0", "1", "2", "3", "4"]
    record = BatchRecord(run / "batches")
    recorded = record.load(3)
    assert recorded.episodes.rows is not None
    recorded.episodes.rows["rollout_log_probs"].values()[0] -= 1.0
    record.save(3, recorded)
    command = start("replay", str(run), "--steps", "2:4")
    assert command.end(timeout_s=400) == 1
    command.check_one_error(r"step 3 differs: .*the weights of the policy on rank 0")
    assert re.findall(r"step (\d+): equal", command.output) == ["1", "2"]


def _engine_memory(command: Command) -> list[Path]:
    """Return the shared memory of the command's engine; other runs on this machine may have their own."""
    folders = Path(command.temporary.name).glob("tidemill-run-*")
    return [path for folder in folders for path in Path("/dev/shm").glob(f"sglang_loads_{folder.name}-*")]


def _wait_for_shared_memory(command: Command) -> None:
    deadline = time.monotonic() + 240
    while not _engine_memory(command):
        assert time.monotonic() < deadline
        time.sleep(0.01)
