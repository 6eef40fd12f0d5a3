"""SGLang's HTTP server on a CPU as a subprocess."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

API_KEY = "not-a-secret"
_ARGUMENTS: dict[str, str | None] = {
    "api-key": API_KEY,
    "host": "127.0.0.1",
    "device": "cpu",
    "dtype": "float32",
    "sampling-backend": "pytorch",
    "mem-fraction-static": "0.1",
    "max-total-tokens": "4096",
    "log-level": "warning",
    "disable-cuda-graph": None,
    "disable-overlap-schedule": None,
    "skip-tokenizer-init": None,
    "skip-server-warmup": None,
    "enable-deterministic-inference": None,
}


@contextmanager
def sglang_server(checkpoint: Path, **arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server; yield its URL and its process, which leads the process group of all its processes.

    Args:
        arguments: SGLang arguments, in addition to those of a small deterministic server.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--port", str(port)]
    for name, value in (_ARGUMENTS | {name.replace("_", "-"): value for name, value in arguments.items()}).items():
        command += [f"--{name}"] if value is None else [f"--{name}", value]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, process)
        yield url, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {API_KEY}"})
    deadline = time.monotonic() + 500
    while True:
        assert process.poll() is None, f"the server exited with {process.returncode}"
        assert time.monotonic() < deadline, "the server did not start within 500 s"
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
