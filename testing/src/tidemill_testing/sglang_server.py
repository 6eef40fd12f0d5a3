"""SGLang's HTTP server on a CPU as a subprocess."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from tidemill_testing.ports import free_ports

API_KEY = "not-a-secret"
HEADERS = {"Authorization": f"Bearer {API_KEY}"}
_ARGUMENTS: dict[str, Any] = {
    "api_key": API_KEY,
    "host": "127.0.0.1",
    "device": "cpu",
    "dtype": "float32",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.1,
    "max_total_tokens": 4096,
    "log_level": "warning",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "enable_deterministic_inference": True,
}


@contextmanager
def sglang_server(
    checkpoint: Path, *, environment: Mapping[str, str] = MappingProxyType({}), **arguments: Any
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server; yield its URL and its process, which leads the process group of all its processes.

    Args:
        checkpoint: folder of the model.
        environment: environment variables in addition to those of this process.
        arguments: SGLang arguments in addition to those of a small deterministic server; False and None remove one.
    """
    port, nccl_port = free_ports(2)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--port", str(port)]
    for name, value in (_ARGUMENTS | {"nccl_port": nccl_port} | arguments).items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        command += [f"--{name.replace('_', '-')}", *map(str, values)]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    shared: set[Path] = set()
    try:
        _wait_until_healthy(url, process)
        shared = _shared_memory(process)
        yield url, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in shared:
            file.unlink(missing_ok=True)  # SGLang does not remove it


def _shared_memory(server: subprocess.Popen[bytes]) -> set[Path]:
    """Return the files in /dev/shm that the server's processes have mapped."""
    process = psutil.Process(server.pid)
    maps = [item for each in (process, *process.children(recursive=True)) for item in each.memory_maps()]
    return {Path(item.path) for item in maps if item.path.startswith("/dev/shm/sglang_loads_")}


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(f"{url}/health", headers=HEADERS)
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
