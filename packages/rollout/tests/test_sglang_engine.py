"""An SGLang engine of this process."""

import asyncio
from dataclasses import replace

import pytest
from tidemill_rollout import EngineError, SamplingParams, SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPT = [5, 6, 7, 8, 9]
LONG = SamplingParams(max_tokens=480, seed=2, extra={"ignore_eos": True})
SHORT = SamplingParams(max_tokens=10, seed=3, extra={"ignore_eos": True})


async def num_running(engine) -> int:
    (load,) = await engine.tokenizer_manager.get_loads()
    return load.num_running_reqs


def test_cancelled_call_frees_its_request_in_the_engine_and_no_other(engine):
    async def run():
        client = SGLangEngine(engine)
        expected = await client.generate(PROMPT, SHORT, session_id="a")
        call = asyncio.create_task(client.generate(PROMPT, LONG, session_id="a"))
        while await num_running(engine) == 0:
            assert not call.done(), call.exception()
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        for _ in range(20):  # 200 tokens: less than the cancelled request would still need
            assert await client.generate(PROMPT, SHORT, session_id="b") == expected
            if await num_running(engine) == 0:
                return
        pytest.fail("the cancelled request still runs")

    engine.loop.run_until_complete(asyncio.wait_for(run(), 300))


def test_interrupted_requests_continue_from_their_tokens(engine):
    async def run():
        client = SGLangEngine(engine)
        engine.tokenizer_manager.record_config_updates("test", weight_version="first")  # that of other tests remains
        prompts = [[*PROMPT, number] for number in range(4)]
        sampling = replace(LONG, max_tokens=160)
        expected = [await client.generate(prompt, sampling, session_id="a") for prompt in prompts]
        calls = [asyncio.create_task(client.generate(prompt, sampling, session_id="a")) for prompt in prompts]
        for version in ("between", "later"):
            while await num_running(engine) < 4:
                await asyncio.sleep(0.01)
            await client.interrupt()
            while await num_running(engine) > 0:  # SGLang publishes it only once its scheduler is idle
                await asyncio.sleep(0.01)
            assert not any(call.done() for call in calls)
            engine.tokenizer_manager.record_config_updates("test", weight_version=version)
            client.proceed()
        return expected, await asyncio.gather(*calls)

    expected, interrupted = engine.loop.run_until_complete(asyncio.wait_for(run(), 300))
    for one, other in zip(expected, interrupted, strict=True):
        assert other.token_ids == one.token_ids
        assert other.log_probs == pytest.approx(one.log_probs, abs=1e-4)
        assert other.finish_reason == "length"
        assert [version for version, _ in other.versions] == ["first", "between", "later"]
        assert all(count > 0 for _, count in other.versions)


class CountingEngine(SGLangEngine):
    """An engine that notes the tokens whose keys and values each request found in SGLang's prefix cache."""

    def __init__(self, engine, **options):
        super().__init__(engine, **options)
        self.cached = []

    async def _run(self, *args):
        output = await super()._run(*args)
        self.cached.append(output["meta_info"].get("cached_tokens"))
        return output


def test_interrupted_requests_keep_their_keys_and_values_and_new_ones_do_not_find_them(engine):
    async def run():
        client = CountingEngine(engine, recompute_kv_cache=False)
        sampling = replace(LONG, max_tokens=160)
        expected = await client.generate(PROMPT, sampling, session_id="a")
        while await num_running(engine) > 0:
            await asyncio.sleep(0.01)
        client.proceed()
        call = asyncio.create_task(client.generate(PROMPT, sampling, session_id="a"))
        while await num_running(engine) == 0:
            await asyncio.sleep(0.01)
        await client.interrupt()
        client.proceed()
        interrupted, num_before = await call, len(client.cached)
        assert (await client.generate(PROMPT, sampling, session_id="a")).token_ids == expected.token_ids
        return expected, interrupted, client.cached, num_before

    expected, interrupted, cached, num_before = engine.loop.run_until_complete(asyncio.wait_for(run(), 300))
    assert interrupted.token_ids == expected.token_ids
    assert interrupted.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
    (_, first), (_, second) = interrupted.versions
    assert first + second == 160
    assert num_before == 3
    assert cached == [0, 0, len(PROMPT) + first - 1, 0]  # all but the last token, whose log-probs are needed


def test_request_that_is_interrupted_before_its_first_token_finds_nothing_of_the_old_weights(engine):
    async def run():
        client, prompt = CountingEngine(engine, recompute_kv_cache=False), PROMPT[::-1]  # of no other test
        for _ in range(50):  # until the interruption comes first
            await client.generate(prompt, SHORT, session_id="a")  # now its keys and values are in the cache
            call = asyncio.create_task(client.generate(prompt, SHORT, session_id="a"))
            await asyncio.sleep(0)
            await client.interrupt()
            client.proceed()
            if len((await call).versions) == 1:
                return client.cached[-1]
        pytest.fail("each request had sampled a token when it was interrupted")

    assert engine.loop.run_until_complete(asyncio.wait_for(run(), 300)) == 0


def test_abort_that_nobody_asked_for_is_an_error(engine):
    async def run():
        client = SGLangEngine(engine)
        call = asyncio.create_task(client.generate(PROMPT, LONG, session_id="a"))
        while await num_running(engine) == 0:
            await asyncio.sleep(0.01)
        engine.tokenizer_manager.abort_request(abort_all=True)
        with pytest.raises(EngineError, match="abort"):
            await call

    engine.loop.run_until_complete(asyncio.wait_for(run(), 300))


def test_request_that_sglang_refuses_is_an_engine_error_with_its_reason(engine):
    call = SGLangEngine(engine).generate([5] * 5000, SHORT, session_id="a")
    with pytest.raises(EngineError, match=r"SGLang refused or aborted the request: .*5000"):
        engine.loop.run_until_complete(call)


def test_stop_string_for_an_engine_without_tokenizer_is_an_error_that_says_what_to_change(engine):
    call = SGLangEngine(engine).generate(PROMPT, SamplingParams(max_tokens=10, stop=("\n",)), session_id="a")
    with pytest.raises(EngineError, match=r"stop=\['\\n'\] requires the tokenizer .* skip_tokenizer_init=False"):
        engine.loop.run_until_complete(call)
