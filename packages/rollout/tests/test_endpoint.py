"""The OpenAI-style endpoint with the `openai` client."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from tidemill_rollout import Endpoint, EngineError, Generation, Policy, Problem, Session, SessionConfig

USER = {"role": "user", "content": "hello"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call><|im_end|>'
LIMIT_S = 60  # a test that waits longer has failed


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


def client_of(session: Session) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)


@contextlib.asynccontextmanager
async def served(policy: Policy) -> AsyncIterator[tuple[Session, openai.AsyncOpenAI]]:
    """A session at an endpoint, with a client."""
    async with asyncio.timeout(LIMIT_S), Endpoint() as endpoint:
        session = policy.session()
        endpoint.add(session)
        async with client_of(session) as client:
            yield session, client


def test_async_client_holds_a_conversation_that_is_recorded_as_one_sequence(scripted):
    async def run():
        async with served(scripted("the answer<|im_end|>", "forty-two<|im_end|>")) as (session, client):
            messages = [USER]
            for expected in ("the answer", "forty-two"):
                response = await client.chat.completions.create(model="any", messages=messages)
                assert response.choices[0].message.content == expected
                assert response.choices[0].finish_reason == "stop"
                assert response.model == "any"
                messages += [response.choices[0].message.model_dump(), USER]
            return session

    session = asyncio.run(run())
    (row,) = session.trajectories()
    assert len(row.turns) == 2
    assert session.metrics()["num_trained_tokens"] == session.metrics()["num_sampled_tokens"] > 0


def test_sync_client_works_from_a_thread(scripted):
    async def run():
        async with served(scripted("the answer<|im_end|>")) as (session, _):

            def call():
                client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
                assert [model.id for model in client.models.list()] == ["policy"]
                assert client.models.retrieve("org/any").id == "org/any"
                return client.chat.completions.create(model="any", messages=[USER])

            return await asyncio.to_thread(call)

    assert asyncio.run(run()).choices[0].message.content == "the answer"


def test_stream_gives_the_reply_and_the_usage(scripted):
    async def run():
        async with served(scripted("the answer<|im_end|>")) as (session, client):
            stream = await client.chat.completions.create(
                model="any", messages=[USER], stream=True, stream_options={"include_usage": True}, logprobs=True
            )
            return session, [chunk async for chunk in stream]

    session, chunks = asyncio.run(run())
    (turn,) = session.recorder.turns
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "the answer"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(turn.generation.token_ids)
    log_probs = [
        token for chunk in chunks[:-1] if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content
    ]
    assert [token.logprob for token in log_probs] == list(turn.generation.log_probs)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_tool_calls_are_returned_and_their_results_continue_the_sequence(scripted_tools, is_stream):
    async def run():
        async with served(scripted_tools(CALL, "sunny<|im_end|>")) as (session, client):
            if is_stream:
                async with client.chat.completions.stream(model="any", messages=[USER], tools=[WEATHER]) as stream:
                    choice = (await stream.get_final_completion()).choices[0]
            else:
                response = await client.chat.completions.create(model="any", messages=[USER], tools=[WEATHER])
                choice = response.choices[0]
            (call,) = choice.message.tool_calls
            assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
            assert json.loads(call.function.arguments) == {"city": "Zürich"}
            asked = {"id": call.id, "type": "function", "function": call.function.model_dump()}
            messages = [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [asked]},
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
            ]
            response = await client.chat.completions.create(model="any", messages=messages, tools=[WEATHER])
            assert response.choices[0].message.content == "sunny"
            return session

    session = asyncio.run(run())
    (row,) = session.trajectories()
    assert len(row.turns) == 2
    assert session.recorder.forks == {}


def test_n_replies_are_separate_sequences(scripted):
    async def run():
        async with served(scripted("hello<|im_end|>", "the answer<|im_end|>", "x<|im_end|>")) as (session, client):
            response = await client.chat.completions.create(model="any", messages=[USER], n=3)
            return session, response

    session, response = asyncio.run(run())
    assert [choice.message.content for choice in response.choices] == ["hello", "the answer", "x"]
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert len(session.trajectories()) == 3


def test_limit_of_tokens_and_stop_strings_reach_the_engine(scripted):
    policy = scripted([5, 6])

    async def run():
        async with served(policy) as (_, client):
            response = await client.chat.completions.create(
                model="any", messages=[USER], max_tokens=2, stop=["\n", "Observation:"]
            )
            assert response.choices[0].finish_reason == "length"
            assert response.usage.completion_tokens == 2

    asyncio.run(run())
    ((_, sampling),) = policy.engine.requests
    assert (sampling.max_tokens, sampling.stop) == (2, ("\n", "Observation:"))


def test_content_ends_before_the_stop_string_and_the_recorded_tokens_continue(scripted, tokenizer):
    stopped = tokenizer.encode("the answer\nObservation: what")

    class StoppingEngine:
        async def generate(self, token_ids, sampling, *, session_id):
            count = len(stopped)
            return Generation(
                token_ids=stopped, log_probs=[-0.5] * count, finish_reason="stop", versions=[("0", count)]
            )

    async def run():
        async with served(Policy(StoppingEngine(), tokenizer)) as (session, client):
            messages = [USER]
            for _ in range(2):
                response = await client.chat.completions.create(model="m", messages=messages, stop="Observation:")
                assert response.choices[0].message.content == "the answer\n"
                messages += [response.choices[0].message.model_dump(), USER]
            return session

    (row,) = asyncio.run(run()).trajectories()
    sampled = [token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if mask]
    assert sampled == stopped * 2
    assert "Observation: what<|im_end|>\n<|im_start|>user" in tokenizer.decode(row.token_ids)


def test_sampling_that_training_cannot_account_for_is_refused_for_training_only(scripted):
    policy = scripted("x<|im_end|>")

    async def run():
        async with served(policy) as (_, client):
            ask = client.chat.completions.create
            with pytest.raises(openai.BadRequestError, match=r"cannot account for temperature=0\.2"):
                await ask(model="any", messages=[USER], temperature=0.2)
            with pytest.raises(openai.BadRequestError, match="cannot account for logit_bias="):
                await ask(model="any", messages=[USER], logit_bias={"5": 1}, stream=True)
            await ask(model="any", messages=[USER], temperature=1.0, top_p=1, frequency_penalty=0, logit_bias={})
        assert len(policy.engine.requests) == 1
        policy.config = SessionConfig(is_training=False)
        async with served(policy) as (_, client):
            await client.chat.completions.create(
                model="any", messages=[USER], temperature=0.2, logit_bias={"5": 1}, presence_penalty=0.5
            )

    asyncio.run(run())
    sampling = policy.engine.requests[-1][1]
    assert sampling.temperature == 0.2
    assert sampling.extra == {"logit_bias": {"5": 1}, "presence_penalty": 0.5}


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
            assert session.limit.limit == "length"
            await ask(model="any", messages=[USER])
            assert session.limit is None
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


def test_key_selects_the_session_and_the_branch(scripted):
    async def run():
        policy = scripted("x<|im_end|>")
        async with asyncio.timeout(LIMIT_S), Endpoint() as endpoint:
            sessions = [policy.session(), policy.session()]
            for session in sessions:
                endpoint.add(session)
            sub = sessions[1].branch("sub-agent ü", is_trained=False)
            for session in (sessions[0], sub):
                await client_of(session).chat.completions.create(model="any", messages=[USER])
            assert len({session.api_key for session in (*sessions, sub)}) == 3
            assert [len(session.recorder.turns) for session in sessions] == [1, 1]
            assert sessions[1].recorder.turns[0].branch == "sub-agent ü"
            assert sessions[1].trajectories() == []
            endpoint.remove(sessions[1])
            for session in (sessions[1], sub):
                with pytest.raises(openai.AuthenticationError):
                    await client_of(session).chat.completions.create(model="any", messages=[USER])
            await client_of(sessions[0]).chat.completions.create(model="any", messages=[USER])
            with pytest.raises(ValueError, match="session-1 has the address"):
                endpoint.add(sessions[0])

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
                    await ask(model="any", messages=[USER], timeout=0.5)
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


def test_thousand_sessions_each_record_their_own_conversation(scripted):
    policy = scripted("the answer<|im_end|>")

    async def run():
        async with asyncio.timeout(LIMIT_S), Endpoint() as endpoint, httpx.AsyncClient(timeout=None) as client:
            sessions = [policy.session() for _ in range(1000)]
            for session in sessions:
                endpoint.add(session)
            connections = asyncio.Semaphore(50)

            async def ask(number: int, session: Session) -> None:
                body = {"messages": [{"role": "user", "content": f"hello {number}"}]}
                headers = {"Authorization": f"Bearer {session.api_key}"}
                async with connections:
                    response = await client.post(f"{session.base_url}/chat/completions", json=body, headers=headers)
                assert response.status_code == 200, response.text

            await asyncio.gather(*(ask(number, session) for number, session in enumerate(sessions)))
            return sessions

    for number, session in enumerate(asyncio.run(run())):
        (turn,) = session.recorder.turns
        assert turn.messages[0]["content"] == f"hello {number}"


def test_connections_do_not_delay_small_replies(scripted):
    """Without TCP_NODELAY, each request on a connection after the first one takes 40 ms."""

    async def run():
        async with Endpoint() as endpoint:
            session = scripted("x<|im_end|>").session()
            endpoint.add(session)
            async with client_of(session) as client:
                await client.models.list()
                (connection,) = endpoint._server.server_state.connections
                accepted = connection.transport.get_extra_info("socket")
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

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
