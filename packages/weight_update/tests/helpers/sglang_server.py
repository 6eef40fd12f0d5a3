"""SGLang's HTTP server as a subprocess."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidemill_weight_update.sglang import sglang_launch_args

KEY = "not-a-secret"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
PROMPT = [5, 6, 7, 8, 9]
SAMPLING = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 4096,
    "log_level": "warning",
    "host": "127.0.0.1",
    "skip_server_warmup": True,
}


class Server:
    """A stock SGLang server on the loopback interface.

    Attributes:
        url: URL of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Send a request; return the status and the body, parsed if it is JSON."""
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
            response = connection.getresponse()
            content = response.read()
        return response.status, json.loads(content) if content[:1] in (b"{", b"[") else content

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=120)

    def generate(self, **fields: Any) -> dict[str, Any]:
        status, out = self.request("POST", "/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING} | fields)
        assert status == 200, out
        return out

    def is_healthy(self) -> bool:
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False


@contextmanager
def serving(checkpoint: Path, *, python_path: Path | None = None, **arguments: Any) -> Iterator[Server]:
    """Start a server of `checkpoint` with the fast loader.

    Args:
        python_path: folder that is searched for modules first.
        arguments: SGLang arguments, in addition to ARGUMENTS.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--api-key", KEY]
    for name, value in (ARGUMENTS | {"port": port} | sglang_launch_args() | arguments).items():
        values = [] if value is True else [str(each) for each in value] if isinstance(value, list) else [str(value)]
        command += [f"--{name.replace('_', '-')}", *values]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 500
        while not server.is_healthy():
            assert process.poll() is None, f"the server exited with {process.returncode}"
            assert time.monotonic() < deadline, "the server did not start within 500 s"
            time.sleep(0.5)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
