"""A session on two real SGLang servers, one of which is killed."""

import asyncio
import os
import signal

import httpx
import pytest
from tidemill_rollout import EnginePool, Policy, SamplingParams, SGLangServer
from tidemill_rollout.session import SessionConfig
from tidemill_testing import tiny_model
from tidemill_testing.sglang_server import API_KEY, HEADERS, sglang_server

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

QUESTIONS = ["hello world", "what is the weather today"]
LIMITS = [8, 700]
CONFIG = SessionConfig(sampling=SamplingParams(max_tokens=700, extra={"ignore_eos": True}))


async def converse(policy, session_id):
    """Run a session of two turns; return its training rows."""
    session = policy.session(session_id, seed=7)
    messages = []
    for question, limit in zip(QUESTIONS, LIMITS, strict=True):
        messages.append({"role": "user", "content": question})
        messages.append((await session.generate(messages, max_tokens=limit)).message)
    return session.trajectories()


async def wait_until_running(url, task):
    """Wait until a server generates the second reply."""
    async with httpx.AsyncClient(headers=HEADERS) as client:
        while not task.done():
            (load,) = (await client.get(f"{url}/v1/loads")).json()["loads"]
            if load["num_running_reqs"] and load["num_used_tokens"] > 100:
                return
            await asyncio.sleep(0.02)


def test_session_continues_with_the_same_tokens_after_its_server_is_killed_while_it_generates(tmp_path, tokenizer):
    folder = tiny_model(tmp_path, vocab_size=len(tokenizer), max_position_embeddings=1024)

    async def run(first_url, second_url, process):
        async with (
            SGLangServer(first_url, api_key=API_KEY) as first,
            SGLangServer(second_url, api_key=API_KEY) as second,
        ):
            expected = await converse(Policy(second, tokenizer, CONFIG), "undisturbed")
            pool = EnginePool({"first": first, "second": second})
            task = asyncio.create_task(converse(Policy(pool, tokenizer, CONFIG), "disturbed"))
            await wait_until_running(first_url, task)
            assert pool.metrics()["num_running/first"] == 1
            os.killpg(process.pid, signal.SIGKILL)
            rows = await task
            assert pool.metrics()["num_failovers"] == 1
            assert pool.metrics()["num_requests/second"] == 1
            assert rows == expected
            assert sum(sum(row.response_mask) for row in rows) == sum(LIMITS)

    with sglang_server(folder) as (first_url, process), sglang_server(folder) as (second_url, _):
        asyncio.run(run(first_url, second_url, process))
