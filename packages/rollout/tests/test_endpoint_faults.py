"""The endpoint with clients that leave, wrong keys, malformed requests, limits, and engines that fail."""

import asyncio
from functools import partial

import httpx
import openai
import pytest
from endpoint_client import LIMIT_S, USER, client_of, served
from tidemill_rollout import Endpoint, EngineError, Generation, Policy, Problem, SessionConfig


class WaitingEngine:
    """An engine that replies when it is released, with one token.

    Attributes:
        started, cancelled: one item per request, the id of its session.
    """

    def __init__(self) -> None:
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self.release = asyncio.Event()

    async def generate(self, token_ids, sampling, *, session_id):
        self.started.put_nowait(session_id)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(session_id)
            raise
        return Generation(token_ids=[5], log_probs=[-0.5], finish_reason="length", versions=[("0", 1)])


class BrokenEngine:
    """An engine that fails."""

    def __init__(self) -> None:
        self.num_requests = 0

    async def generate(self, token_ids, sampling, *, session_id):
        self.num_requests += 1
        await asyncio.sleep(0.01)
        raise EngineError("the server returned 500")


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_limits_are_errors_that_the_client_does_not_repeat(scripted, is_stream):
    policy = scripted("x<|im_end|>", config=SessionConfig(context_length=60, max_turns=1))

    async def run():
        async with served(policy) as (session, client):
            ask = client.chat.completions.create
            long = {"role": "user", "content": "what is the weather today " * 20}
            with pytest.raises(openai.BadRequestError, match="context length is 60") as error:
                await ask(model="any", messages=[long], stream=is_stream)
            assert error.value.code == "context_length_exceeded"
            assert session.limit_of("").limit == "length"
            await ask(model="any", messages=[USER])
            assert session.limit_of("") is None
            with pytest.raises(openai.BadRequestError, match="limit of 1 turns") as error:
                await ask(model="any", messages=[USER], stream=is_stream)
            assert error.value.code == "max_turns_exceeded"

    asyncio.run(run())
    assert len(policy.engine.requests) == 1


def test_episode_that_fails_after_a_limit_is_truncated_and_its_key_is_refused_afterwards(scripted):
    keys = []

    async def episode(problem, session):
        keys.append(session.api_key)
        client = client_of(session)
        messages = [USER]
        while True:
            response = await client.chat.completions.create(model="any", messages=messages)
            messages += [response.choices[0].message.model_dump(), USER]

    async def run():
        async with asyncio.timeout(LIMIT_S), Endpoint() as endpoint:
            policy = scripted("x<|im_end|>", config=SessionConfig(max_turns=3), endpoint=endpoint)
            result = await policy.run(episode, Problem(prompt="hello"))
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=keys[0]) as client:
                with pytest.raises(openai.AuthenticationError, match="episode has ended"):
                    await client.chat.completions.create(model="any", messages=[USER])
            return result

    result = asyncio.run(run())
    assert (result.outcome.status, result.metrics["num_turns"]) == ("truncated", 3)
    assert result.outcome.reason.startswith("turns: ")


def test_episode_that_fails_without_a_limit_is_an_environment_error(scripted):
    async def episode(problem, session):
        await client_of(session).chat.completions.create(model="any", messages=[USER], temperature=0.5)

    async def run():
        async with asyncio.timeout(LIMIT_S), Endpoint() as endpoint:
            return await scripted("x<|im_end|>", endpoint=endpoint).run(episode, Problem(prompt="hello"))

    outcome = asyncio.run(run()).outcome
    assert outcome.status == "environment_error"
    assert "cannot account for temperature=0.5" in outcome.reason


def test_wrong_and_missing_keys_are_refused(scripted):
    async def run():
        async with served(scripted("x<|im_end|>")) as (session, client):
            with pytest.raises(openai.AuthenticationError, match="no running session has this API key"):
                await client.with_options(api_key="wrong").models.list()
            with pytest.raises(openai.BadRequestError, match="has no branch 'critic', only main"):
                await client.with_options(api_key=f"{session.api_key}:critic").models.list()
            async with httpx.AsyncClient() as plain:
                response = await plain.post(f"{session.base_url}/chat/completions", json={"messages": [USER]})
            assert response.status_code == 401
            assert "expected the header 'Authorization: Bearer KEY'" in response.json()["error"]["message"]
            assert session.recorder.turns == []

    asyncio.run(run())


def test_ended_session_is_refused(scripted):
    async def run():
        async with served(scripted("x<|im_end|>")) as (session, client):
            await session.end()
            with pytest.raises(openai.AuthenticationError, match="session-1 has ended"):
                await client.chat.completions.create(model="any", messages=[USER])

    asyncio.run(run())


def test_session_that_ends_during_a_request_frees_it_and_informs_the_client(tokenizer):
    async def run():
        engine = WaitingEngine()
        async with served(Policy(engine, tokenizer)) as (session, client):
            request = asyncio.create_task(client.chat.completions.create(model="any", messages=[USER]))
            await engine.started.get()
            await session.end()
            assert await engine.cancelled.get() == session.id
            with pytest.raises(openai.AuthenticationError, match="ended before the engine replied"):
                await request

    asyncio.run(run())


@pytest.mark.parametrize("how", ["mid-stream", "whole reply", "n replies", "client timeout"])
def test_client_that_disconnects_frees_its_requests_and_no_others(tokenizer, how):
    async def run():
        engine = WaitingEngine()
        policy = Policy(engine, tokenizer)
        async with asyncio.timeout(LIMIT_S), Endpoint() as endpoint:
            leaving, staying = policy.session("leaving"), policy.session("staying")
            endpoint.add(leaving)
            endpoint.add(staying)
            other = asyncio.create_task(client_of(staying).chat.completions.create(model="any", messages=[USER]))
            assert await engine.started.get() == "staying"
            ask = client_of(leaving).with_options(max_retries=0).chat.completions.create
            number = 3 if how == "n replies" else 1
            if how == "mid-stream":
                stream = await ask(model="any", messages=[USER], stream=True)
                assert (await anext(aiter(stream))).choices[0].delta.role == "assistant"
                await engine.started.get()
                await stream.close()
            elif how == "client timeout":
                with pytest.raises(openai.APITimeoutError):
                    await ask(model="any", messages=[USER], timeout=3.0)
            else:
                request = asyncio.create_task(ask(model="any", messages=[USER], n=number))
                for _ in range(number):
                    await engine.started.get()
                request.cancel()
            assert [await engine.cancelled.get() for _ in range(number)] == ["leaving"] * number
            engine.release.set()
            assert (await other).choices[0].finish_reason == "length"
            assert engine.cancelled.empty()
            assert (len(leaving.recorder.turns), len(staying.recorder.turns)) == (0, 1)

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_engine_error_reaches_the_client_which_does_not_repeat_the_request(tokenizer, is_stream):
    async def run():
        engine = BrokenEngine()
        async with served(Policy(engine, tokenizer)) as (_, client):

            async def ask() -> None:
                response = await client.chat.completions.create(model="any", messages=[USER], stream=is_stream)
                async for _ in response:
                    pass

            with pytest.raises(openai.APIError, match="the server returned 500") as error:
                await ask()
            assert error.value.code == "engine_error"
        assert engine.num_requests == 1

    asyncio.run(run())


def test_malformed_requests_are_refused_with_a_message(scripted):
    policy = scripted("x<|im_end|>")
    cases = {
        b"not JSON": "the body must be JSON",
        b"\xff": "the body must be JSON",
        b"[]": "the body must be a JSON object",
        b"{}": "messages must be a list",
        b'{"messages": []}': "messages must be a non-empty list",
        b'{"messages": [3]}': "messages[0]: expected an object with a role",
        b'{"messages": [{"role": "robot", "content": "x"}]}': "messages[0]: expected an object with a role",
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': "only text content is supported",
        b'{"messages": [{"role": "assistant", "content": "x"}]}': "the last message must not be from the assistant",
        b'{"messages": [{"role": "user", "content": "x"}], "n": "2"}': "n must be an integer",
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}': "surrogates not allowed",
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 9223372036854775808}': "seed must be >= -2**63 and",
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"5": "x"}}': "values of logit_bias must be",
    }

    async def run():
        async with served(policy) as (session, client), httpx.AsyncClient() as plain:
            headers = {"Authorization": f"Bearer {session.api_key}"}
            for body, message in cases.items():
                response = await plain.post(f"{session.base_url}/chat/completions", content=body, headers=headers)
                assert response.status_code == 400, (body, response.text)
                assert message in response.json()["error"]["message"]
            with pytest.raises(openai.NotFoundError, match="set the client to the chat completions API"):
                await client.responses.create(model="any", input="hello")
            await client.chat.completions.create(model="any", messages=[USER])

    asyncio.run(run())
    assert len(policy.engine.requests) == 1


def test_template_error_is_a_bad_request(bpe):
    tokenizer = bpe("{{ raise_exception('roles must alternate') }}")

    async def run():
        async with served(Policy(BrokenEngine(), tokenizer)) as (_, client):
            with pytest.raises(openai.BadRequestError, match="roles must alternate"):
                await client.chat.completions.create(model="any", messages=[USER])

    asyncio.run(run())


def test_session_is_refused_before_the_endpoint_runs(scripted):
    with pytest.raises(RuntimeError, match="enter it with `async with`"):
        Endpoint().add(scripted("x<|im_end|>").session())


def test_port_in_use_is_an_error_that_names_the_address():
    async def run():
        async with Endpoint() as first:
            port = int(first.base_url.split(":")[2].removesuffix("/v1"))
            with pytest.raises(OSError, match=rf"127\.0\.0\.1.*{port}"):
                await Endpoint(port=port).__aenter__()

    asyncio.run(run())


def test_session_is_refused_after_the_endpoint_has_stopped(scripted):
    async def add():
        async with Endpoint() as endpoint:
            pass
        endpoint.add(scripted("x").session())

    with pytest.raises(RuntimeError, match="does not run"):
        asyncio.run(add())


def test_client_that_fails_by_a_limit_after_others_have_continued_is_truncated(scripted):
    def episode(problem, session):
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            ask = partial(client.chat.completions.create, model="any")
            try:
                ask(messages=[USER | {"content": "x" * 200}])  # a sub-agent
            except openai.BadRequestError as error:
                refused = error
            ask(messages=[USER])  # another one continues
            raise refused

    async def run_at_endpoint():
        async with Endpoint() as endpoint:
            config = SessionConfig(context_length=60)
            return await scripted("x<|im_end|>", config=config, endpoint=endpoint).run(episode, Problem(prompt=""))

    outcome = asyncio.run(run_at_endpoint()).outcome
    assert (outcome.status, outcome.reason.partition(":")[0]) == ("truncated", "length")
