"""Ctrl-C in a terminal: SIGINT to the whole process group of the driver leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow]  # starts its own cluster

DRIVER = """
import json, os, subprocess, time
import psutil, ray
from tidemill_dispatch import Dispatch, Worker, register
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

class Sleeper(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def start_child(self):
        return os.getpid(), subprocess.Popen(["sleep", "1000"]).pid

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self):
        time.sleep(1000)

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
pool = RayResourcePool(process_on_nodes=[2])
group = RayWorkerGroup(pool, RayClassWithInitArgs(Sleeper), name_prefix="sleepers")
try:
    workers = [pid for pids in group.start_child() for pid in pids]
    processes = psutil.Process().children(recursive=True)
    maps = {m.path for p in processes for m in p.memory_maps() if m.path.startswith("/dev/shm/")}
    print(json.dumps([workers, [p.pid for p in processes], sorted(maps)]), flush=True)
    group.sleep()
except KeyboardInterrupt:
    group.shutdown()
    print(json.dumps([pid for pid in workers if os.path.exists(f"/proc/{pid}")]), flush=True)
    ray.shutdown()
"""


def test_ctrl_c_leaves_no_process_and_no_shared_memory(tmp_path: Path, ctrl_c: None):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert driver.stdout is not None
    try:
        workers, processes, shared_memory = json.loads(driver.stdout.readline())
        assert len(workers) == 4
        assert set(workers) <= set(processes)
        time.sleep(1.0)
        os.killpg(driver.pid, signal.SIGINT)
        assert json.loads(driver.stdout.readline()) == []
        assert driver.wait(timeout=30) == 0
    finally:
        driver.kill()
        driver.wait()
    deadline = time.monotonic() + 15
    while (still := [pid for pid in processes if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert still == []
    assert [path for path in shared_memory if os.path.exists(path)] == []
