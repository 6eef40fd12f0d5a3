"""Stock SGLang engine with requests during updates, and with tensors that it must not load."""

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference_answers import most_likely, state
from tidemill_testing import tiny_model
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.sglang import LocalEngine

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

PROMPT = [5, 6, 7, 8, 9]
NUM_TOKENS = 300
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoints(checkpoint, tmp_path_factory) -> list[Path]:
    """Two checkpoints of one architecture: requests start with the first, the second is sent while they run."""
    return [checkpoint, tiny_model(tmp_path_factory.mktemp("sent"), "qwen3", seed=3, num_hidden_layers=3)]


@pytest.fixture(scope="module")
def models(checkpoints) -> list[Any]:
    return [transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in checkpoints]


def greedy_after_switch(models: list[Any], tokens: list[int], count: int, num_read: int) -> list[int]:
    """Greedy tokens of the second model at the positions of `tokens[count:]`, with a KV cache in which the first model
    computed the first `num_read` tokens of prompt and answer."""
    sequence = torch.tensor([PROMPT + tokens])
    with torch.no_grad():
        cache = models[0](sequence[:, :num_read], use_cache=True).past_key_values
        logits = models[1](sequence[:, num_read:], past_key_values=cache).logits[0]
    return logits[len(PROMPT) + count - 1 - num_read : -1].argmax(-1).tolist()


def generate(engine, **fields: Any) -> dict[str, Any]:
    """Generate with a tokenizer request, which has fields that `engine.generate` lacks."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(input_ids=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 24}, **fields)
    return engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(request, None)))


class Running:
    """Request that has returned its first tokens, and continues whenever the event loop of the engine runs."""

    def __init__(self, engine) -> None:
        self._engine = engine
        stream = engine.loop.run_until_complete(self._start())
        self._task = engine.loop.create_task(self._collect(stream))

    async def _start(self):
        sampling = GREEDY | {"max_new_tokens": NUM_TOKENS}
        stream = await self._engine.async_generate(input_ids=PROMPT, sampling_params=sampling, stream=True)
        self._last = await anext(stream)
        return stream

    async def _collect(self, stream) -> dict[str, Any]:
        tokens = list(self._last["output_ids"])
        async for self._last in stream:
            tokens = self._last["output_ids"]
        return self._last | {"output_ids": tokens}

    def result(self) -> dict[str, Any]:
        return self._engine.loop.run_until_complete(self._task)


@pytest.fixture(autouse=True)
def flush_after_test(engine) -> Iterator[None]:
    """Flush the prefix cache, which paused engines keep. The scheduler becomes idle shortly after its last answer."""
    yield
    deadline = time.monotonic() + 10
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline, "the cache cannot be flushed"
        time.sleep(0.02)


@pytest.fixture
def updated_while_running(engine, models):
    """`updated_while_running(in_flight)`: update from the first model to the second while a request runs.

    Returns the number of its tokens that agree with the first model, its tokens, and its finish reason.
    """

    def run(in_flight: str) -> tuple[int, list[int], dict[str, Any]]:
        updater = WeightUpdater([LocalEngine(engine)], bucket_bytes=1 << 16, in_flight=in_flight)
        updater.update(state(models[0]), "old")
        running = Running(engine)
        stats = updater.update(state(models[1]), "new")
        assert (stats.verified, stats.quarantined) == (True, {})
        result = running.result()
        updater.close()
        tokens = result["output_ids"]
        is_old = [a == b for a, b in zip(tokens, most_likely(models[0], PROMPT, tokens), strict=True)]
        count = is_old.index(False) if False in is_old else len(tokens)
        return count, tokens, result["meta_info"]["finish_reason"]

    return run


def test_wait_finishes_requests_with_the_old_weights(engine, models, updated_while_running):
    count, tokens, reason = updated_while_running("wait")
    assert (count, len(tokens), reason["type"]) == (NUM_TOKENS, NUM_TOKENS, "length")
    after = generate(engine)["output_ids"]
    assert after == most_likely(models[1], PROMPT, after) != most_likely(models[0], PROMPT, after)


def test_abort_ends_running_requests(engine, models, updated_while_running):
    count, tokens, reason = updated_while_running("abort")
    assert 0 < count == len(tokens) < NUM_TOKENS
    assert reason["type"] == "abort"
    after = generate(engine)["output_ids"]
    assert after == most_likely(models[1], PROMPT, after)


def test_retract_recomputes_requests_except_for_cached_prefixes(models, updated_while_running):
    """The prompt is found in the prefix cache, computed with the old weights."""
    count, tokens, reason = updated_while_running("retract")
    assert 0 < count < len(tokens) == NUM_TOKENS
    assert reason["type"] == "length"
    assert tokens[count:] == greedy_after_switch(models, tokens, count, num_read=len(PROMPT))


def test_in_place_continues_requests_with_their_kv_cache(models, updated_while_running):
    count, tokens, reason = updated_while_running("in_place")
    assert 0 < count < len(tokens) == NUM_TOKENS
    assert reason["type"] == "length"
    assert tokens[count:] == greedy_after_switch(models, tokens, count, num_read=len(PROMPT) + count - 1)


class Traffic:
    """Short requests of several callers whenever the event loop of the engine runs."""

    def __init__(self, engine, num_callers: int) -> None:
        self._engine = engine
        self._random = random.Random(0)
        self._is_over = False
        self._tasks = [engine.loop.create_task(self._call_on()) for _ in range(num_callers)]

    async def _stream(self, num_tokens: int):
        sampling = GREEDY | {"max_new_tokens": num_tokens}
        return await self._engine.async_generate(input_ids=PROMPT, sampling_params=sampling, stream=True)

    async def _call_on(self) -> None:
        from sglang.srt.managers.tokenizer_manager import RequestAbortedError

        while not self._is_over:
            with contextlib.suppress(RequestAbortedError):
                async for _ in await self._stream(self._random.randint(1, 12)):
                    pass
            await asyncio.sleep(self._random.random() * 0.01)

    async def _leave(self) -> None:
        stream = await self._stream(60)
        await anext(stream)
        await stream.aclose()

    def run_and_abandon_one(self) -> None:
        """Run the callers for a moment, then start a request and abandon it."""
        self._engine.loop.run_until_complete(asyncio.sleep(self._random.random() * 0.03))
        self._engine.loop.run_until_complete(self._leave())

    def end(self) -> None:
        # No `task.cancel()`: SGLang waits with `asyncio.wait_for`, which in Python 3.11 can swallow a cancellation.
        self._is_over = True
        self._engine.loop.run_until_complete(asyncio.gather(*self._tasks))


class StockEngine(LocalEngine):
    """Client of an engine that was launched without the fast loader."""

    has_loader = False


@pytest.mark.parametrize(
    ("client", "in_flight"),
    [
        *((LocalEngine, in_flight) for in_flight in ("wait", "abort", "retract", "in_place")),
        *((StockEngine, in_flight) for in_flight in ("wait", "abort", "in_place")),
    ],
)
def test_updates_with_concurrent_and_abandoned_requests(engine, models, in_flight, client):
    """SGLang crashes if it flushes its cache while a request runs; an abandoned request still runs for a while."""
    updater = WeightUpdater([client(engine)], in_flight=in_flight)
    traffic = Traffic(engine, num_callers=4)
    for version in range(3 if in_flight == "abort" else 6):  # SGLang waits a second for aborted requests
        traffic.run_and_abandon_one()
        model = models[version % 2]
        assert updater.update(state(model), version).quarantined == {}
        out = generate(engine, extra_key=None if in_flight in ("wait", "abort") else str(version))
        assert out["meta_info"]["weight_version"] == str(version)
        assert out["output_ids"] == most_likely(model, PROMPT, out["output_ids"])
    traffic.end()
    updater.close()


def make_bad(changed: dict[str, torch.Tensor], kind: str) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    if kind == "missing":
        del changed[name]
    elif kind == "unknown":
        changed["model.layers.9.mlp.down_proj.weight"] = changed[name]
    elif kind == "shape":
        changed[name] = torch.cat([changed[name], changed[name][:, :1]], dim=1)
    elif kind == "nan":
        changed[name] = torch.full_like(changed[name], float("nan"))


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("missing", RuntimeError, r"no tensor was sent for these parameters .*'model\.layers\.1\.mlp\.down_proj"),
        ("unknown", RuntimeError, r"no parameter for these tensors: 'model\.layers\.9\.mlp\.down_proj\.weight'"),
        ("shape", RuntimeError, r"a part of these tensors: 'model\.layers\.1\.mlp\.down_proj\.weight' \("),
        ("nan", ValueError, r"NaN elements: 'model\.layers\.1\.mlp\.down_proj\.weight'"),
    ],
)
def test_bad_tensors_are_refused_by_name(engine, models, kind, error, message):
    """The answers are bitwise the same as before. NaN is found while tensors are sent; then the engine is paused until
    it is readmitted."""
    client = LocalEngine(engine)
    updater = WeightUpdater([client], bucket_bytes=1 << 16)
    updater.update(state(models[0]), "good")
    wanted = generate(engine, return_logprob=True)
    bad = {name: tensor.clone() for name, tensor in state(models[1])}
    make_bad(bad, kind)
    with pytest.raises(error, match=message):
        updater.update(bad.items(), "bad")
    if kind == "nan":
        updater.readmit([client], state(models[0]), "good")
    out = generate(engine, return_logprob=True)
    assert out["meta_info"]["weight_version"] == "good"
    assert out["output_ids"] == wanted["output_ids"]
    assert out["meta_info"]["output_token_logprobs"] == wanted["meta_info"]["output_token_logprobs"]
    updater.close()
