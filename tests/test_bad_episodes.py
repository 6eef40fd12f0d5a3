"""Episodes that raise, hang, print without end or kill their process, beside sound ones, on the cluster of the loop."""

import os
import time

import pytest
import ray
import torch
from tidemill_rollout import Problem
from tidemill_trainer.rollout.episode_pool import _Batch
from tidemill_trainer.rollout.episode_task import EpisodeTask

pytestmark = [pytest.mark.ray, pytest.mark.sglang, pytest.mark.timeout(600), pytest.mark.xdist_group("cluster")]

_EPISODES = """
import asyncio, os, re, sys
import httpx
from tidemill_rollout.episodes.command import command

keys = []
gigabyte = "for _ in range(1024): print('x' * 2**20)"
prints_elsewhere = command([sys.executable, "-c", gigabyte + "\\nprint(1.0)"])

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

async def use(key, session):  # until its session has ended
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as client:
        while True:
            (await client.get(f"{session.base_url}/models")).raise_for_status()

def blocking(data_source, solution_str, ground_truth, extra_info):
    return 1.0 if extra_info == "fine" else float(bool(re.match("(a+)+$", "a" * 60 + "b")))  # takes years

async def episode(problem, session):
    kind = problem.extra_info
    if kind == "dies":
        os._exit(3)
    if kind == "exits":
        exit()
    if kind == "raises":
        raise KeyError("seven")
    if kind == "slow":
        await asyncio.sleep(4)
    if kind == "hangs":
        await asyncio.sleep(1000)
    if kind == "opens sessions":
        await asyncio.gather(*(session.branch().generate(text=problem.prompt) for _ in range(1000)))
    if kind == "other key":
        await use(keys[0], session)
    if kind in ("prints", "command prints"):
        before = peak_kib()
        if kind == "prints":
            exec(gigabyte)
        else:
            assert (await prints_elsewhere(problem, session)).reward == 1.0
        return {"score": 1.0, "grown_kib": peak_kib() - before}
    keys.append(session.api_key)
    reply = await session.generate(text=problem.prompt)
    return {"nan": float("nan"), "none": None, "text": "1.0"}.get(kind, 1.0)
"""


def _run_episodes(cluster, make_config, folder, kinds, *overrides, meanwhile=lambda: None):
    """Run one episode of each kind and return all, with the outcomes by kind; call `meanwhile` after their start."""
    (folder / "env.py").write_text(_EPISODES)
    cluster.episodes.load(make_config(f"episode.function={folder / 'env.py'}:episode", *overrides))
    tasks = [
        EpisodeTask(number=number, problem=Problem(prompt="12+34=", id=str(number), extra_info=kind), seed=1)
        for number, kind in enumerate(kinds)
    ]
    running = cluster.episodes.start(tasks, greedy=False)
    meanwhile()
    episodes = cluster.episodes.wait(running)
    accounted = sum(summary.num_tokens for summary in episodes.summaries) + episodes.num_lost
    assert accounted == episodes.num_generated
    return episodes, {kind: each.outcome for kind, each in zip(kinds, episodes.summaries, strict=True)}


def test_bad_episodes_affect_no_other(cluster, make_config, tmp_path):
    kinds = ["fine", "exits", "raises", "hangs", "nan", "none", "text", "fine"]
    episodes, outcomes = _run_episodes(cluster, make_config, tmp_path, kinds, "episode.timeout_s=8")
    assert {kind for kind, outcome in outcomes.items() if outcome.status == "ok"} == {"fine"}
    assert outcomes["hangs"].reason == "time: no result within 8 s"
    reasons = {kind: outcome.reason for kind, outcome in outcomes.items() if outcome.status == "environment_error"}
    assert reasons.keys() == {"exits", "raises", "nan", "none", "text"}
    assert reasons["raises"] == "KeyError: 'seven' (in env.py:28)"
    assert reasons["exits"].startswith("SystemExit")
    assert reasons["nan"].startswith("ValueError: expected a finite float32")
    assert reasons["none"].startswith("TypeError: an episode or a reward function must return a number")
    assert episodes.rows is not None
    assert sorted(set(episodes.rows["episode"].tolist())) == [0, 7]
    first, second = episodes.rows["responses"].unbind()
    assert torch.equal(first, second)  # the same seed


def test_time_in_which_engines_are_released_does_not_count(cluster, make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.engines, "in_turns", True)
    cluster.engines.update_weights(0)

    def train():
        cluster.episodes.release()
        time.sleep(5)

    limit = "episode.timeout_s=3"
    _, outcomes = _run_episodes(cluster, make_config, tmp_path, ["slow", "hangs"], limit, meanwhile=train)
    assert outcomes["slow"].status == "ok"
    assert outcomes["hangs"].reason == "time: no result within 3 s"


def test_thousand_sessions_and_the_key_of_an_ended_session_affect_no_other(cluster, make_config, tmp_path):
    kinds = ["fine", "opens sessions", "other key", "fine"]
    _, outcomes = _run_episodes(cluster, make_config, tmp_path, kinds)
    assert outcomes["fine"].status == "ok"
    assert outcomes["opens sessions"].reason == "turns: session 1/0/0 has reached its limit of 100 turns"
    assert outcomes["other key"].reason.startswith("HTTPStatusError: Client error '401 Unauthorized'")


def test_episode_that_kills_its_process_affects_no_other(cluster, make_config, tmp_path):
    kinds = ["fine", "dies", "fine"]
    episodes, outcomes = _run_episodes(cluster, make_config, tmp_path, kinds, "episode.max_retries=0")
    assert outcomes["fine"].status == "ok"
    assert outcomes["dies"].reason.startswith("died: episode worker 0 died; see ")
    assert 2 <= episodes.num_restarts <= 3
    assert episodes.rows is not None
    assert episodes.rows["episode"].tolist() == [0, 2]


def test_parts_that_wait_while_the_driver_is_busy_are_received(cluster, make_config, tmp_path):
    pool = cluster.episodes
    _run_episodes(cluster, make_config, tmp_path, ["fine"])
    task = EpisodeTask(number=0, problem=Problem(prompt="12+34=", id="0"), seed=1)
    stream = pool.workers[0].run.remote([task], greedy=False)
    batch = _Batch(worker=0, actor=pool.workers[0], tasks={0: task}, last_part_s=time.monotonic() - 1000.0)
    parts = []
    ray.wait([stream])
    while (reason := pool._receive(stream, batch, parts)) is None:
        pass
    assert (reason, batch.tasks) == ("", {})
    assert sum(len(part.summaries) for part in parts) == 1


_DIES_WHILE_LOADED = """
import os, pathlib
try:
    (pathlib.Path(__file__).parent / "victim").unlink()
except FileNotFoundError:
    pass
else:
    os._exit(3)

def score(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""


def test_worker_that_dies_while_it_loads_user_functions_is_replaced(cluster, make_config, tmp_path):
    (tmp_path / "reward.py").write_text(_DIES_WHILE_LOADED)
    (tmp_path / "victim").touch()
    before = list(cluster.episodes.workers)
    cluster.episodes.load(make_config(f"reward.function={tmp_path / 'reward.py'}:score"))
    pairs = zip(before, cluster.episodes.workers, strict=True)
    assert sum(worker is not earlier for earlier, worker in pairs) == 1
    assert not (tmp_path / "victim").exists()


def test_workers_that_always_die_while_they_load_user_functions_are_an_error(cluster, make_config, tmp_path):
    (tmp_path / "reward.py").write_text("import os\nos._exit(3)")
    with pytest.raises(RuntimeError, match=r"died in each of 3 attempts to load the user's functions; see .*episodes_"):
        cluster.episodes.load(make_config(f"reward.function={tmp_path / 'reward.py'}:score"))
    cluster.episodes.load(make_config())


@pytest.mark.slow
def test_gigabytes_of_output_fill_no_memory_and_affect_no_other(cluster, make_config, tmp_path):
    kinds = ["fine", "prints", "command prints", "fine"]
    _, outcomes = _run_episodes(cluster, make_config, tmp_path, kinds, "episode.timeout_s=120")
    assert {outcome.status for outcome in outcomes.values()} == {"ok"}
    assert all(outcomes[kind].metrics["grown_kib"] < 64 * 1024 for kind in ("prints", "command prints"))
    log = cluster.watch.report.with_name("episodes_0.log")
    assert log.stat().st_size > 1 << 30
    os.truncate(log, 0)


@pytest.mark.slow
def test_reward_function_that_blocks_its_process_is_found_among_many(cluster, make_config, tmp_path):
    kinds = ["fine"] * 5 + ["blocks"] + ["fine"] * 10
    reward = f"reward.function={tmp_path / 'env.py'}:blocking"
    episodes, outcomes = _run_episodes(
        cluster, make_config, tmp_path, kinds, "episode.function=single_turn", reward, "episode.max_retries=0"
    )
    assert outcomes["fine"].status == "ok"
    assert outcomes["blocks"].status == "environment_error"
    assert "regular expression, of episode 5/0 holds the interpreter" in outcomes["blocks"].reason
    assert episodes.num_restarts == 2  # among the others, and alone
