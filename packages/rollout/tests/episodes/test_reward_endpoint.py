"""Rewards from an endpoint: real HTTP servers that reply wrongly or not at all, and a real SGLang server."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
import uvicorn
from safetensors.torch import load_file, save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tidemill_rollout import Problem
from tidemill_rollout.episodes import RewardEndpoint, endpoint_turn
from tidemill_testing import tiny_reward_model
from tidemill_testing.ports import free_ports
from tidemill_testing.sglang_server import sglang_server
from transformers import AutoModelForSequenceClassification

PROBLEM = Problem(prompt=[{"role": "user", "content": "hello"}])


@asynccontextmanager
async def serve(reply):
    """Run an HTTP server whose `/classify` is `await reply(body)`, and yield its URL."""

    async def classify(request: Request) -> Response:
        return await reply(await request.json())

    app = Starlette(routes=[Route("/classify", classify, methods=["POST"])])
    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, port=port, lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        assert not serving.done()
        await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


def run(policy, reply, **settings):
    """Run one episode against a server with these replies; return its result and the server's URL."""

    async def run():
        async with serve(reply) as url:
            return await policy.run(endpoint_turn(RewardEndpoint(url, **settings)), PROBLEM), url

    return asyncio.run(run())


def test_reward_is_the_score_of_the_tokens_of_prompt_and_reply(scripted):
    received = []

    async def reply(body):
        received.append(body)
        return JSONResponse({"embedding": [-1.5], "meta_info": {"prompt_tokens": 3}})

    result, _ = run(scripted("the answer<|im_end|>"), reply)
    assert (result.outcome.status, result.outcome.reward) == ("ok", -1.5)
    assert received == [{"input_ids": list(result.trajectories[0].token_ids)}]
    assert result.trajectories[0].num_prompt_tokens < len(received[0]["input_ids"])


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (JSONResponse({"error": "too long"}, 400), 'expected status 200 from URL, got 400: {"error":"too long"}'),
        (Response("overloaded", 503), "expected status 200 from URL, got 503: overloaded"),
        (Response("<html>"), 'expected {"embedding": [score]} from URL, as SGLang'),
        (Response("<html>"), "got <html>: "),
        (Response('{"embedding": [NaN]}'), 'got {"embedding": [NaN]}: expected a finite float32'),
        (JSONResponse({"embedding": ["1.0"]}), "got '1.0'"),
        (JSONResponse({"embedding": [None]}), "got None"),
        (JSONResponse({"embedding": []}), 'one label, got {"embedding":[]}: 0 numbers'),
        (JSONResponse({"embedding": [0.1, 0.9]}), 'one label, got {"embedding":[0.1,0.9]}: 2 numbers'),
        (JSONResponse({"embedding": 0.5}), "no list of numbers in `embedding`"),
        (JSONResponse([{"embedding": [0.5]}]), "no list of numbers in `embedding`"),
        (JSONResponse({"text": "good"}), "no list of numbers in `embedding`"),
    ],
)
def test_wrong_reply_is_an_environment_error_with_the_address(scripted, response, message):
    async def reply(body):
        return response

    result, url = run(scripted("x<|im_end|>"), reply)
    assert result.outcome.status == "environment_error"
    assert result.outcome.reason.startswith("RewardEndpointError: ")
    assert message.replace("URL", f"{url}/classify") in result.outcome.reason
    assert f"{url}/classify" in result.outcome.reason


def test_slow_server_is_an_environment_error_with_the_limit(scripted):
    async def reply(body):
        await asyncio.sleep(0.5)
        return JSONResponse({"embedding": [1.0]})

    result, url = run(scripted("x<|im_end|>"), reply, timeout_s=0.05)
    assert result.outcome.status == "environment_error"
    assert f"RewardEndpointError: {url}/classify returned no score within 0.05 s" in result.outcome.reason


def test_unreachable_server_is_an_environment_error(scripted):
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    result = asyncio.run(scripted("x<|im_end|>").run(endpoint_turn(RewardEndpoint(url)), PROBLEM))
    assert result.outcome.status == "environment_error"
    assert f"RewardEndpointError: the request to {url}/classify failed: ConnectError" in result.outcome.reason


def test_concurrent_episodes_do_not_wait_for_each_other(scripted):
    num_episodes, policy = 200, scripted("x<|im_end|>")
    all_received = asyncio.Event()
    num_received = 0

    async def reply(body):
        nonlocal num_received
        num_received += 1
        if num_received == num_episodes:
            all_received.set()
        await all_received.wait()  # no reply before the last request
        return JSONResponse({"embedding": [1.0]})

    async def many():
        async with serve(reply) as url:
            episode = endpoint_turn(RewardEndpoint(url, timeout_s=30))
            return await asyncio.gather(*(policy.run(episode, PROBLEM) for _ in range(num_episodes)))

    assert [result.outcome.reward for result in asyncio.run(many())] == [1.0] * num_episodes


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "localhost", "http://", "ftp://host", "http://host:port", ""])
def test_wrong_address_is_refused(url):
    with pytest.raises(ValueError, match=r"expected an address such as http://127\.0\.0\.1:30000, got "):
        RewardEndpoint(url)


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(580)
def test_score_of_a_real_server_equals_that_of_transformers(scripted, tokenizer, tmp_path):
    folder = tiny_reward_model(tmp_path, "qwen2", vocab_size=len(tokenizer))
    weights = load_file(folder / "model.safetensors")
    # SGLang's Qwen2 has a bias that it leaves at random if the checkpoint has none.
    save_file(weights | {"score.bias": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    problems = [
        PROBLEM,
        Problem(prompt=[{"role": "user", "content": "the weather today " * 5}]),
        Problem(prompt="what"),
    ]
    policy = scripted("the answer<|im_end|>")

    async def many(url):
        episode = endpoint_turn(RewardEndpoint(url, timeout_s=120))
        return await asyncio.gather(*(policy.run(episode, problem) for problem in problems))

    arguments = {"is_embedding": True, "enable_deterministic_inference": None}
    with sglang_server(folder, api_key=None, **arguments) as (url, _):
        results = asyncio.run(many(url))
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for result in results:
        with torch.no_grad():
            expected = model(torch.tensor([list(result.trajectories[0].token_ids)])).logits[0, 0].item()
        assert result.outcome.reward == pytest.approx(expected, abs=1e-4)
    assert len({result.outcome.reward for result in results}) == len(problems)
