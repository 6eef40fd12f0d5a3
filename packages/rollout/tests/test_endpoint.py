"""The OpenAI-style endpoint with the `openai` client."""

import asyncio
import json
import socket

import httpx
import openai
import pytest
from endpoint_client import LIMIT_S, USER, client_of, served
from tidemill_rollout import Endpoint, Generation, Policy, Session, SessionConfig

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


def test_endpoint_on_all_interfaces_has_an_address_that_clients_can_connect_to(scripted):
    async def run():
        async with asyncio.timeout(LIMIT_S), Endpoint("0.0.0.0") as endpoint:
            session = scripted("the answer<|im_end|>").session()
            endpoint.add(session)
            assert "0.0.0.0" not in session.base_url
            async with httpx.AsyncClient(trust_env=False) as client:
                headers = {"Authorization": f"Bearer {session.api_key}"}
                assert (await client.get(f"{session.base_url}/models", headers=headers)).status_code == 200

    asyncio.run(run())


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
