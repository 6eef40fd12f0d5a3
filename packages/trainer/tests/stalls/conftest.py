import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tidemill_trainer.stalls.process import Registration, start_s

_ENDLESS = """
import faulthandler, signal, sys
if sys.argv[1:] == ["traces"]:
    from tidemill_trainer.stalls.stack import enable_traces
    enable_traces()
def endless_loop():
    print("ready", flush=True)
    while True:
        pass
endless_loop()
"""


@pytest.fixture
def endless(tmp_path):
    """Start a Python process in an endless loop; return its registration. It writes to `name`.log in `tmp_path`."""
    started = []

    def start(name, *, traces=False, stopped=False):
        log = tmp_path / f"{name}.log"
        with log.open("w") as output:
            command = [sys.executable, "-c", _ENDLESS, *(["traces"] if traces else [])]
            process = subprocess.Popen(command, stdout=output, stderr=output)
        started.append(process)
        while "ready" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        if stopped:
            os.kill(process.pid, signal.SIGSTOP)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
        return Registration(name=name, pid=process.pid, created_s=start_s(process.pid))

    yield start
    for process in started:
        process.kill()
        process.wait()
