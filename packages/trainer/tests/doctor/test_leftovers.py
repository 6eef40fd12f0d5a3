import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile

import psutil
import pytest
from tidemill_trainer.doctor.leftovers import clean, describe
from tidemill_trainer.stalls.process import start_s


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """`runs("name")`: a run of this machine with two processes, of which one is a child of the other."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = []

    def start(name, *, created_s=0.0, host=None):
        folder = tmp_path / "runs" / name
        (folder / "logs").mkdir(parents=True)
        (folder / "lock").write_text(f"process 1 on {host or socket.gethostname()}")
        code = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
        parent = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        process = psutil.Process(parent.pid)
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        started.extend([child, parent])
        row = {"name": "actor_0", "pid": process.pid, "created_s": created_s or start_s(process.pid), "node": ""}
        (folder / "logs" / "processes.jsonl").write_text(json.dumps(row) + "\n")
        return folder, [process, child]

    yield start
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        if isinstance(process, subprocess.Popen):
            process.communicate()


def _alive(processes):
    return [p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes]


def test_clean_kills_recorded_processes_of_dead_runs_and_their_children(runs, tmp_path):
    run, processes = runs("dead")
    assert len(describe(tmp_path / "runs")) == 2
    removed = clean(tmp_path / "runs")
    assert _alive(processes) == [False, False]
    assert sorted(removed) == sorted(text for text in removed if f"of the run {run}" in text)
    assert len(removed) == 2
    assert describe(tmp_path / "runs") == ()


def test_clean_leaves_a_live_run_alone(runs, tmp_path):
    run, processes = runs("live")
    with (run / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the driver does
        assert describe(tmp_path / "runs") == ()
        assert clean(tmp_path / "runs") == []
    assert _alive(processes) == [True, True]


@pytest.mark.parametrize("other", [{"created_s": 1.0}, {"host": "elsewhere"}])
def test_clean_leaves_a_process_of_somebody_else_alone(runs, tmp_path, other):
    _, processes = runs("dead", **other)
    assert clean(tmp_path / "runs") == []
    assert _alive(processes) == [True, True]


def test_clean_removes_folders_that_nobody_holds(runs, tmp_path):
    dead, live = (tmp_path / f"tidemill-run-{name}" for name in ("dead", "live"))
    dead.mkdir()
    live.mkdir()
    held = os.open(live, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    assert describe(tmp_path / "runs") == (str(dead),)
    assert dead.exists()
    assert clean(tmp_path / "runs") == [f"{dead} and its shared memory"]
    assert [dead.exists(), live.exists()] == [False, True]
    os.close(held)
