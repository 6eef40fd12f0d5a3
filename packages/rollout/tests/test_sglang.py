"""A real SGLang server as the engine."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from tidemill_rollout import Endpoint, EngineDiedError, EngineError, Policy, SamplingParams, SessionConfig, SGLangServer
from tidemill_testing import tiny_model
from tidemill_testing.sglang_server import API_KEY, HEADERS, sglang_server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer) -> Iterator[str]:
    """URL of a server of a tiny model that runs at most two requests at a time."""
    folder = tiny_model(
        tmp_path_factory.mktemp("model"), "qwen3", vocab_size=len(tokenizer), max_position_embeddings=32768
    )
    tokenizer.save_pretrained(folder)
    # The server must not free requests by itself, which it otherwise does 4 s after their connection has been closed.
    environment = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "3600"}
    arguments = {"max_total_tokens": 131072, "max_running_requests": 2, "skip_tokenizer_init": False}
    with sglang_server(folder, environment=environment, **arguments) as (url, _):
        yield url


@asynccontextmanager
async def client(url: str) -> AsyncIterator[SGLangServer]:
    async with asyncio.timeout(120), SGLangServer(url, api_key=API_KEY) as engine:
        yield engine


async def load(url: str) -> tuple[int, int]:
    """Return the number of running and of queued requests."""
    async with httpx.AsyncClient(headers=HEADERS, timeout=120) as plain:
        (loads,) = (await plain.get(f"{url}/v1/loads")).json()["loads"]
    return loads["num_running_reqs"], loads["num_waiting_reqs"]


async def wait_for_load(url: str, expected: tuple[int, int]) -> None:
    while await load(url) != expected:
        await asyncio.sleep(0.05)


def forever(seed: int = 0) -> SamplingParams:
    """Sampling parameters of a request that runs much longer than the test."""
    return SamplingParams(max_tokens=20000, seed=seed, extra={"ignore_eos": True})


def policy(engine: SGLangServer, tokenizer, **changes) -> Policy:
    return Policy(engine, tokenizer, SessionConfig(context_length=4096, **changes))


async def generate(url: str, **fields) -> dict:
    """Return what the server itself generates."""
    async with httpx.AsyncClient(headers=HEADERS, timeout=120) as plain:
        response = await plain.post(f"{url}/generate", json={"return_logprob": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_recorded_tokens_and_log_probs_are_those_of_the_server(server, tokenizer):
    async def run():
        async with client(server) as engine:
            session = policy(engine, tokenizer).session(seed=3)
            reply = await session.generate(token_ids=PROMPT, max_tokens=24)
            sampling = {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": 3}
            return session, reply, await generate(server, input_ids=PROMPT, sampling_params=sampling)

    session, reply, expected = asyncio.run(run())
    assert [[log_prob, token, None] for token, log_prob in zip(reply.token_ids, reply.log_probs, strict=True)] == (
        expected["meta_info"]["output_token_logprobs"]
    )
    (row,) = session.trajectories()
    assert row.versions == [(expected["meta_info"]["weight_version"], len(reply.token_ids))]
    assert len(set(row.rollout_log_probs)) > 1


def test_conversation_over_http_continues_the_recorded_tokens(server, tokenizer):
    """The random model writes invalid UTF-8, so its tokens cannot be recovered from the text that a client sends."""
    messages = [{"role": "user", "content": "hello"}]
    lengths = []

    async def run():
        async with client(server) as engine, Endpoint() as endpoint:
            session = policy(engine, tokenizer).session()
            endpoint.add(session)
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
                for seed in (11, 12, 13):
                    response = await agent.chat.completions.create(
                        model="any", messages=messages, seed=seed, max_tokens=24
                    )
                    messages.append(response.choices[0].message.model_dump())
                    messages.append({"role": "user", "content": "what is the weather today"})
                    lengths.append(response.usage.prompt_tokens)
            (row,) = session.trajectories()
            for seed, length in zip((11, 12, 13), lengths, strict=True):
                sampling = {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": seed}
                ids = list(row.token_ids)
                expected = await generate(server, input_ids=ids[:length], sampling_params=sampling)
                sampled = expected["output_ids"]
                assert ids[length : length + len(sampled)] == sampled
            scored = await generate(server, input_ids=ids, sampling_params={"max_new_tokens": 1}, logprob_start_len=0)
            return row, scored["meta_info"]["input_token_logprobs"]

    row, scored = asyncio.run(run())
    assert "\ufffd" in "".join(str(message["content"]) for message in messages)
    assert (len(row.turns), row.num_prompt_tokens) == (3, lengths[0])
    pairs = zip(row.rollout_log_probs, row.response_mask, scored[row.num_prompt_tokens :], strict=True)
    differences = [abs(log_prob - item[0]) for log_prob, mask, item in pairs if mask]
    assert max(differences) < 1e-4


def test_stop_string_ends_the_reply_and_remains_in_the_tokens(server, tokenizer):
    async def run():
        async with client(server) as engine:
            whole = await policy(engine, tokenizer).session(seed=3).generate(token_ids=PROMPT, max_tokens=24)
            stop = next(char for char in whole.text[5:] if char.isascii() and char.isalpha())
            session = policy(engine, tokenizer).session(seed=3)
            return stop, whole, await session.generate(token_ids=PROMPT, max_tokens=24, stop=stop)

    stop, whole, reply = asyncio.run(run())
    assert reply.finish_reason == "stop"
    assert stop in reply.text
    assert stop not in reply.message["content"]
    assert list(reply.token_ids) == list(whole.token_ids)[: len(reply.token_ids)]
    assert len(reply.token_ids) < len(whole.token_ids)


def test_cancelling_frees_running_and_queued_requests_and_no_others(server):
    async def run():
        async with client(server) as engine:

            def start() -> asyncio.Task:
                return asyncio.create_task(engine.generate(PROMPT, forever(), session_id="a"))

            running = [start(), start()]
            await wait_for_load(server, (2, 0))
            queued = [start(), start()]
            await wait_for_load(server, (2, 2))
            queued[0].cancel()
            await wait_for_load(server, (2, 1))
            running[0].cancel()
            await wait_for_load(server, (2, 0))  # the queued request has taken the free place
            assert not running[1].done()
            assert not queued[1].done()
            for task in (running[1], queued[1]):
                task.cancel()
            await wait_for_load(server, (0, 0))
            results = await asyncio.gather(*running, *queued, return_exceptions=True)
            assert [type(result) for result in results] == [asyncio.CancelledError] * 4

    asyncio.run(run())


def test_request_that_is_cancelled_while_it_is_sent_is_freed(server):
    async def run():
        async with client(server) as engine:
            for steps in range(40):
                task = asyncio.create_task(engine.generate(PROMPT, forever(), session_id="a"))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
            await wait_for_load(server, (0, 0))
            generation = await engine.generate(
                PROMPT, SamplingParams(max_tokens=3, extra={"ignore_eos": True}), session_id="a"
            )
            assert len(generation.token_ids) == 3

    asyncio.run(run())


@pytest.mark.parametrize("cause", ["client disconnects", "session ends", "timeout"])
def test_request_is_freed_when_its_agent_leaves(server, tokenizer, cause):
    async def run():
        async with client(server) as engine, Endpoint() as endpoint:
            timeout_s = 10.0 if cause == "timeout" else 600.0
            config = SessionConfig(context_length=30000, is_training=False, generate_timeout_s=timeout_s)
            session = Policy(Forever(engine), tokenizer, config).session()
            endpoint.add(session)
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
                request = asyncio.create_task(
                    agent.chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}])
                )
                await wait_for_load(server, (1, 0))
                if cause == "client disconnects":
                    request.cancel()
                elif cause == "session ends":
                    await session.end()
                await wait_for_load(server, (0, 0))
                (error,) = await asyncio.gather(request, return_exceptions=True)
            expected = {"session ends": "ended before the engine replied", "timeout": "no reply within 10 s"}
            assert expected.get(cause, "") in str(error)
            assert session.recorder.turns == []

    asyncio.run(run())


class Forever:
    """An engine whose requests run much longer than the test."""

    def __init__(self, engine: SGLangServer) -> None:
        self._engine = engine

    async def generate(self, token_ids, sampling, *, session_id):
        return await self._engine.generate(token_ids, forever(), session_id=session_id)


def test_failures_of_the_server_are_engine_errors_with_their_text(server):
    async def run():
        async with client(server) as engine:
            with pytest.raises(EngineError, match=r"returned 400: .*longer than the model's context length"):
                await engine.generate([5] * 40000, SamplingParams(max_tokens=3), session_id="a")
        async with SGLangServer(server, api_key="wrong") as engine:
            with pytest.raises(EngineError, match="returned 401"):
                await engine.generate(PROMPT, SamplingParams(max_tokens=3), session_id="a")
        async with SGLangServer("http://127.0.0.1:1") as engine:
            with pytest.raises(EngineDiedError, match=r"127\.0\.0\.1:1 failed: ConnectError"):
                await engine.generate(PROMPT, SamplingParams(max_tokens=3), session_id="a")

    asyncio.run(run())
