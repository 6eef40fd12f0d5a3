"""Stock SGLang with requests that run while its weights are replaced, and with tensors that it must not load."""

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
    """Two of one architecture: what requests begin with, and what is sent while they run."""
    return [checkpoint, tiny_model(tmp_path_factory.mktemp("sent"), "qwen3", seed=3, num_hidden_layers=3)]


@pytest.fixture(scope="module")
def models(checkpoints) -> list[Any]:
    return [transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in checkpoints]


def continued(models: list[Any], tokens: list[int], count: int, num_read: int) -> list[int]:
    """What the second model would have answered in the place of `tokens[count:]`, if the first one has read the first
    `num_read` tokens of prompt and answer for it."""
    sequence = torch.tensor([PROMPT + tokens])
    with torch.no_grad():
        cache = models[0](sequence[:, :num_read], use_cache=True).past_key_values
        logits = models[1](sequence[:, num_read:], past_key_values=cache).logits[0]
    return logits[len(PROMPT) + count - 1 - num_read : -1].argmax(-1).tolist()


def generate(engine, **fields: Any) -> dict[str, Any]:
    """Through the tokenizer's request, which has fields that `engine.generate` lacks."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(input_ids=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 24}, **fields)
    return engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(request, None)))


class Running:
    """A request that has answered its first tokens, and goes on whenever the engine's loop runs."""

    def __init__(self, engine) -> None:
        self._engine = engine
        stream = engine.loop.run_until_complete(self._begin())
        self._task = engine.loop.create_task(self._go_on(stream))

    async def _begin(self):
        sampling = GREEDY | {"max_new_tokens": NUM_TOKENS}
        stream = await self._engine.async_generate(input_ids=PROMPT, sampling_params=sampling, stream=True)
        self._last = await anext(stream)
        return stream

    async def _go_on(self, stream) -> dict[str, Any]:
        tokens = list(self._last["output_ids"])
        async for self._last in stream:
            tokens = self._last["output_ids"]
        return self._last | {"output_ids": tokens}

    def result(self) -> dict[str, Any]:
        return self._engine.loop.run_until_complete(self._task)


@pytest.fixture(autouse=True)
def nothing_is_cached(engine) -> Iterator[None]:
    """Paused engines keep their prefix caches. A scheduler may need a moment after its last answer to be idle."""
    yield
    deadline = time.monotonic() + 10
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline, "the cache cannot be flushed"
        time.sleep(0.02)


@pytest.fixture
def updated_while_running(engine, models):
    """`updated_while_running(in_flight)`: what becomes of a request that began with the first model's weights when the
    second's come; as the number of its tokens that the first model may have answered, the tokens, and why it ended."""

    def run(in_flight: str) -> tuple[int, list[int], dict[str, Any]]:
        updater = WeightUpdater([LocalEngine(engine)], bucket_bytes=1 << 16, in_flight=in_flight)
        updater.update(state(models[0]), "old")
        running = Running(engine)
        stats = updater.update(state(models[1]), "new")
        assert (stats.verified, stats.quarantined) == (True, {})
        result = running.result()
        updater.close()
        tokens = result["output_ids"]
        of_old = [a == b for a, b in zip(tokens, most_likely(models[0], PROMPT, tokens), strict=True)]
        count = of_old.index(False) if False in of_old else len(tokens)
        return count, tokens, result["meta_info"]["finish_reason"]

    return run


def test_requests_that_are_waited_for_end_with_the_weights_they_began_with(engine, models, updated_while_running):
    count, tokens, reason = updated_while_running("wait")
    assert (count, len(tokens), reason["type"]) == (NUM_TOKENS, NUM_TOKENS, "length")
    after = generate(engine)["output_ids"]
    assert after == most_likely(models[1], PROMPT, after) != most_likely(models[0], PROMPT, after)


def test_requests_that_are_aborted_end_at_once(engine, models, updated_while_running):
    count, tokens, reason = updated_while_running("abort")
    assert 0 < count == len(tokens) < NUM_TOKENS
    assert reason["type"] == "abort"
    after = generate(engine)["output_ids"]
    assert after == most_likely(models[1], PROMPT, after)


def test_requests_that_are_retracted_are_computed_anew_but_for_the_prefix_cache(models, updated_while_running):
    """SGLang has put their prompts there, and finds them again."""
    count, tokens, reason = updated_while_running("retract")
    assert 0 < count < len(tokens) == NUM_TOKENS
    assert reason["type"] == "length"
    assert tokens[count:] == continued(models, tokens, count, num_read=len(PROMPT))


def test_requests_that_stay_in_place_go_on_from_what_they_have_computed(models, updated_while_running):
    count, tokens, reason = updated_while_running("in_place")
    assert 0 < count < len(tokens) == NUM_TOKENS
    assert reason["type"] == "length"
    assert tokens[count:] == continued(models, tokens, count, num_read=len(PROMPT) + count - 1)


@pytest.mark.parametrize("in_flight", ["retract", "in_place"])
def test_with_the_version_as_extra_key_no_old_entry_of_the_cache_is_found(engine, models, in_flight):
    updater = WeightUpdater([LocalEngine(engine)], in_flight=in_flight)
    for version in range(4):
        model = models[version % 2]
        updater.update(state(model), version)
        for is_cached in (False, True):
            out = generate(engine, extra_key=str(version))
            assert out["output_ids"] == most_likely(model, PROMPT, out["output_ids"])
            assert (out["meta_info"]["cached_tokens"] > 0) == is_cached
    updater.close()


class Traffic:
    """Requests that come and go whenever the engine's loop runs."""

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

    def go_on(self) -> None:
        """For a moment, in the end of which a caller goes away; its request runs."""
        self._engine.loop.run_until_complete(asyncio.sleep(self._random.random() * 0.03))
        self._engine.loop.run_until_complete(self._leave())

    def end(self) -> None:
        # No `task.cancel()`: SGLang waits with `asyncio.wait_for`, which in Python 3.11 can swallow a cancellation.
        self._is_over = True
        self._engine.loop.run_until_complete(asyncio.gather(*self._tasks))


class StockEngine(LocalEngine):
    """Of an engine that somebody else launched."""

    has_loader = False


@pytest.mark.parametrize("client", [LocalEngine, StockEngine])
@pytest.mark.parametrize("in_flight", ["wait", "abort", "retract", "in_place"])
def test_requests_come_and_go_during_updates(engine, models, in_flight, client):
    """SGLang ends if it is to flush its cache while a request runs, and one that its caller has left does."""
    updater = WeightUpdater([client(engine)], in_flight=in_flight)
    traffic = Traffic(engine, num_callers=4)
    for version in range(6):
        traffic.go_on()
        model = models[version % 2]
        assert updater.update(state(model), version).quarantined == {}
        out = generate(engine, extra_key=None if in_flight in ("wait", "abort") else str(version))
        assert out["meta_info"]["weight_version"] == str(version)
        assert out["output_ids"] == most_likely(model, PROMPT, out["output_ids"])
    traffic.end()
    updater.close()


def refused(changed: dict[str, torch.Tensor], kind: str) -> list[tuple[str, torch.Tensor]]:
    name = "model.layers.1.mlp.down_proj.weight"
    if kind == "missing":
        del changed[name]
    elif kind == "unknown":
        changed["model.layers.9.mlp.down_proj.weight"] = changed[name]
    elif kind == "shape":
        changed[name] = torch.cat([changed[name], changed[name][:, :1]], dim=1)
    elif kind == "dtype":
        changed[name] = changed[name].to(torch.int32)
    elif kind == "nan":
        changed[name] = torch.full_like(changed[name], float("nan"))
    return [*changed.items(), *([(name, changed[name])] if kind == "twice" else [])]


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("missing", RuntimeError, r"no tensor was sent for these parameters .*'model\.layers\.1\.mlp\.down_proj"),
        ("unknown", RuntimeError, r"no parameter for these tensors: 'model\.layers\.9\.mlp\.down_proj\.weight'"),
        ("shape", RuntimeError, r"a part of these tensors: 'model\.layers\.1\.mlp\.down_proj\.weight' \("),
        ("dtype", RuntimeError, r"'model\.layers\.1\.mlp\.down_proj\.weight' has the wrong dtype"),
        ("twice", ValueError, r"'model\.layers\.1\.mlp\.down_proj\.weight' was passed twice"),
        ("nan", ValueError, r"NaN elements: 'model\.layers\.1\.mlp\.down_proj\.weight'"),
    ],
)
def test_bad_tensors_are_refused_by_name(engine, models, kind, error, message):
    """Before anything changes: the engine answers what it did, to the last bit. But values are looked at as they are
    sent; then it is paused until it has been sent others."""
    updater = WeightUpdater([LocalEngine(engine)], bucket_bytes=1 << 16)
    updater.update(state(models[0]), "good")
    wanted = generate(engine, return_logprob=True)
    bad = refused({name: tensor.clone() for name, tensor in state(models[1])}, kind)
    with pytest.raises(error, match=message):
        updater.update(bad, "bad")
    if kind == "nan":
        updater.update(state(models[0]), "good")
    out = generate(engine, return_logprob=True)
    assert out["meta_info"]["weight_version"] == "good"
    assert out["output_ids"] == wanted["output_ids"]
    assert out["meta_info"]["output_token_logprobs"] == wanted["meta_info"]["output_token_logprobs"]
    updater.close()
