"""A real SGLang server as the engine."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from tidemill_rollout import EngineError, Endpoint, Policy, SamplingParams, SessionConfig, SGLangServer
from tidemill_testing import tiny_model

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

KEY = "not-a-secret"
PROMPT = [5, 6, 7, 8, 9]
HEADERS = {"Authorization": f"Bearer {KEY}"}
ARGUMENTS = {
    "api-key": KEY,
    "host": "127.0.0.1",
    "device": "cpu",
    "dtype": "float32",
    "sampling-backend": "pytorch",
    "mem-fraction-static": "0.1",
    "max-total-tokens": "131072",
    "max-running-requests": "2",
    "log-level": "warning",
    "disable-cuda-graph": None,
    "disable-overlap-schedule": None,
    "skip-server-warmup": None,
    "enable-deterministic-inference": None,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer) -> Iterator[str]:
    """URL of a server of a tiny model that runs at most two requests at a time."""
    folder = tiny_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=len(tokenizer), max_position_embeddings=32768)
    tokenizer.save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port)]
    for name, value in ARGUMENTS.items():
        command += [f"--{name}"] if value is None else [f"--{name}", value]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while True:
        assert process.poll() is None, f"the server exited with {process.returncode}"
        assert time.monotonic() < deadline, "the server did not start within 300 s"
        try:
            if httpx.get(f"{url}/health", headers=HEADERS, timeout=60).status_code == 200:
                return
        except httpx.ConnectError:
            time.sleep(0.5)


@asynccontextmanager
async def client(url: str) -> AsyncIterator[SGLangServer]:
    async with asyncio.timeout(120), SGLangServer(url, api_key=KEY) as engine:
        yield engine


async def load(url: str) -> tuple[int, int]:
    """Return the number of running and of queued requests."""
    async with httpx.AsyncClient(headers=HEADERS) as plain:
        (loads,) = (await plain.get(f"{url}/v1/loads")).json()["loads"]
    return loads["num_running_reqs"], loads["num_waiting_reqs"]


async def wait_for_load(url: str, expected: tuple[int, int]) -> None:
    while await load(url) != expected:
        await asyncio.sleep(0.05)


def forever(seed: int = 0) -> SamplingParams:
    """Sampling parameters of a request that runs much longer than the test."""
    return SamplingParams(max_tokens=20000, seed=seed, extra={"ignore_eos": True})
