import subprocess
import sys
from dataclasses import replace

import psutil
from tidemill_trainer.stalls.process import Registration, observe, register, registered


def test_stopped_and_busy_processes_are_told_apart(endless):
    stopped, busy = observe([endless("actor_1", stopped=True), endless("rollout_0")])
    assert str(stopped).startswith("rank 1 of group 'actor', process ")
    assert str(stopped).endswith(", is stopped (state T)")
    assert stopped.is_stopped
    assert stopped.cpu_share == 0
    assert not busy.is_stopped
    assert busy.title == "rank 0 of group 'rollout_0'"
    assert busy.cpu_share > 0
    assert busy.state.startswith("busy with ")
    assert busy.rss_bytes > 0


def test_descendants_are_named_after_their_command_and_the_nearest_registered_process(endless):
    me = Registration.of_this_process("driver")
    worker = endless("episodes_2")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        states = {state.pid: state for state in observe([me, worker])}
        child.kill()
    assert states[me.pid].title == "driver"
    assert states[worker.pid].title == "episode worker 2"
    assert states[child.pid].title.endswith("import time; time.sleep(60) below driver")


def test_process_that_exited_or_has_the_id_of_another_one_is_left_out(endless):
    registration = endless("actor_0")
    assert len(observe([registration])) == 1
    assert observe([replace(registration, created_s=registration.created_s - 1)]) == []


def test_process_is_found_after_the_clock_was_set(endless, monkeypatch):
    registration = endless("actor_0", stopped=True)
    booted_s = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_s + 2)  # the kernel derives it from the clock
    assert [state.is_stopped for state in observe([registration])] == [True]


def test_registered_processes_are_read_back(tmp_path, endless):
    assert registered(tmp_path) == []
    first, second = endless("actor_0"), Registration.of_this_process("episodes_0", "some node")
    register(tmp_path, first)
    register(tmp_path, second)
    assert registered(tmp_path) == [first, second]
