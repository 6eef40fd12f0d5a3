"""Examples, run as a user does, against an SGLang server."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
API_KEY = "example"

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def server(checkpoint: Path, environment: dict[str, str]) -> Iterator[str]:
    """URL of a server that was started from the command line."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--port", str(port)]
    command += ["--skip-tokenizer-init", "--api-key", API_KEY, "--max-total-tokens", "1024", "--log-level", "warning"]
    command += ["--skip-server-warmup", "--custom-weight-loader", "tidemill_weight_update.sglang.loader.load"]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while ask(url, "/health") is None:
            assert process.poll() is None, "the server ended while it started"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def ask(url: str, path: str) -> str | None:
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {API_KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.read().decode()
    except urllib.error.URLError:
        return None


def run(environment: dict[str, str], *command: str) -> str:
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def version(url: str) -> str:
    answer = ask(url, "/model_info")
    assert answer is not None
    return json.loads(answer)["weight_version"]


def test_fsdp2_example(server, checkpoint, environment):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    output = run(environment, *torchrun, str(EXAMPLES / "fsdp2.py"), str(checkpoint), server, API_KEY)
    assert output.count("verified: True") == 3
    assert version(server) == "3"


def test_hf_trainer_example(server, checkpoint, environment):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
    output = run(environment, sys.executable, str(EXAMPLES / "hf_trainer.py"), str(checkpoint), server, API_KEY)
    assert output.count("verified: True") == 3
    assert version(server) == "3"
