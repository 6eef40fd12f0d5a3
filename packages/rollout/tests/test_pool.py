"""The pool of engines: routing, and engines that die."""

import asyncio

import pytest
from pool_cases import PROMPT, SAMPLING, Case, HeldEngine, reply, settle
from tidemill_rollout import EngineDiedError, EngineError, EnginePool, Policy


def test_request_goes_to_the_least_loaded_engine():
    async def run():
        case = Case("abc")
        for number in range(6):
            await case.start(f"s{number}")
        assert [len(case.sessions(name)) for name in "abc"] == [2, 2, 2]
        case.engines["b"].finish()
        await settle()
        await case.start("s6")
        assert "s6" in case.sessions("b")

    asyncio.run(run())


def test_idle_engines_take_turns():
    async def run():
        case = Case("abc")
        for number in range(6):
            task = await case.start(f"s{number}")
            next(engine for engine in case.engines.values() if engine.running).finish()
            await task
        assert [len(engine.calls) for engine in case.engines.values()] == [2, 2, 2]

    asyncio.run(run())


def test_session_stays_on_its_engine_although_another_is_less_loaded():
    async def run():
        case = Case()
        first = await case.start("s0")
        case.engines["a"].finish()
        await first
        case.pool.add("c", HeldEngine())
        for _ in range(3):
            await case.start("s0")
        assert case.sessions("a") == ["s0"] * 3

    asyncio.run(run())


def test_request_of_a_dead_engine_continues_on_another_with_the_same_tokens():
    async def run():
        case = Case()
        tasks = [await case.start(f"s{number}") for number in range(4)]
        case.engines["a"].die()
        await settle()
        assert case.sessions("b") == ["s1", "s3", "s0", "s2"]
        for number in range(4):
            case.engines["b"].finish(number)
        expected = reply(PROMPT, SAMPLING)
        assert await asyncio.gather(*tasks) == [expected] * 4
        assert case.pool.metrics()["num_failovers"] == 2
        assert len(case.engines["a"].calls) == 2

    asyncio.run(run())


def test_session_whose_engine_dies_in_a_later_turn_repeats_this_turn_alone(tokenizer):
    async def converse(policy):
        session = policy.session("s", seed=7)
        messages = []
        for question in ("hello world", "what is the weather today"):
            messages.append({"role": "user", "content": question})
            messages.append((await session.generate(messages, max_tokens=4)).message)
        return session.trajectories()

    async def run(dies):
        case = Case()
        task = asyncio.create_task(converse(Policy(case.pool, tokenizer)))
        await settle()
        case.engines["a"].finish()
        await settle()
        if dies:
            case.engines["a"].die()
            await settle()
        case.engines["b" if dies else "a"].finish()
        return await task, [len(engine.calls) for engine in case.engines.values()]

    expected, calls = asyncio.run(run(dies=False))
    assert calls == [2, 0]
    assert asyncio.run(run(dies=True)) == (expected, [2, 1])


def test_requests_wait_for_a_restart_where_the_pool_awaits_one():
    async def check():
        engine = HeldEngine()
        pool = EnginePool({"a": engine}, awaits_restart=True)
        task = asyncio.create_task(pool.generate(PROMPT, SAMPLING, session_id="s"))
        await settle()
        engine.die()
        await settle()
        assert pool.metrics()["num_waiting"] == 1
        assert pool.metrics()["num_engines"] == 0
        assert str(pool) == "a: failed: connection reset"
        again = HeldEngine()
        pool.add("a", again)
        await settle()
        again.finish()
        assert await task == reply(PROMPT, SAMPLING)
        assert pool.metrics()["num_failovers"] == 1

    asyncio.run(check())


def test_removed_engine_finishes_its_requests_and_receives_no_others():
    async def run():
        case = Case()
        running = await case.start("s0")
        case.pool.remove("a")
        later = [await case.start("s0"), await case.start("s1")]
        assert case.sessions("b") == ["s0", "s1"]
        case.engines["a"].finish()
        assert await running == reply(PROMPT, SAMPLING)
        for number in range(2):
            case.engines["b"].finish(number)
        await asyncio.gather(*later)
        with pytest.raises(ValueError, match="expected one of several engines of the pool, b, got 'b'"):
            case.pool.remove("b")
        with pytest.raises(ValueError, match="got 'a'"):
            case.pool.remove("a")

    asyncio.run(run())


def test_error_lists_all_engines_with_their_last_error_when_none_is_left():
    async def run():
        case = Case()
        task = await case.start("s0")
        case.engines["b"].is_dead = True
        case.engines["a"].die()
        with pytest.raises(EngineDiedError, match=r"none of 2 engines .*a: .*reset; b: .*refused\); restart"):
            await task

    asyncio.run(run())


def test_request_that_crashes_engines_is_sent_to_two_further_ones_and_others_continue():
    async def run():
        case = Case("abcde")
        for name in "abc":
            case.engines[name].is_dead = True
        with pytest.raises(
            EngineError, match=r"^3 engines died .* \(a: .*refused; b: .*refused; c: .*refused\)"
        ) as error:
            await case.pool.generate(PROMPT, SAMPLING, session_id="s0")
        assert not isinstance(error.value, EngineDiedError)
        assert [len(engine.calls) for engine in case.engines.values()] == [1, 1, 1, 0, 0]
        other = await case.start("s1")
        case.engines["d"].finish()
        assert await other == reply(PROMPT, SAMPLING)

    asyncio.run(run())


def test_request_that_engines_had_stopped_for_is_sent_to_the_next_one():
    async def run():
        case = Case("abcde")
        for name in "abcd":
            case.engines[name].is_closed = True
        other = await case.start("s0")
        case.engines["e"].finish()
        assert await other == reply(PROMPT, SAMPLING)

    asyncio.run(run())


def test_forgotten_session_goes_to_any_engine():
    async def run():
        case = Case("ab")
        for session in ("s0", "s1"):
            await case.start(session)
        [first] = [name for name in "ab" if case.engines[name].calls == ["s1"]]
        case.engines[first].finish()
        case.pool.forget("s0")
        await case.start("s0")
        assert case.engines[first].calls == ["s1", "s0"]

    asyncio.run(run())


def test_error_of_a_request_does_not_remove_its_engine():
    async def run():
        case = Case()
        task = await case.start("s0")
        case.engines["a"].finish(error=EngineError("a log-prob is missing"))
        with pytest.raises(EngineError, match="a log-prob is missing"):
            await task
        assert case.pool.metrics()["num_engines"] == 2
        assert case.pool.metrics()["num_failovers"] == 0
        await case.start("s0")
        assert case.sessions("a") == ["s0"]

    asyncio.run(run())


def test_cancelled_request_is_cancelled_in_its_engine_and_no_longer_running():
    async def run():
        case = Case("a")
        task = await case.start("s0")
        assert case.pool.metrics()["num_running/a"] == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert case.sessions("a") == []
        assert case.pool.metrics()["num_running/a"] == 0

    asyncio.run(run())


def test_restarted_engine_receives_requests_again():
    async def run():
        case = Case()
        await case.start("s0")
        case.engines["a"].die()
        await case.start("s1")
        assert case.sessions("b") == ["s0", "s1"]
        case.engines["a"] = HeldEngine()
        case.pool.add("a", case.engines["a"])
        await case.start("s2")
        assert case.sessions("a") == ["s2"]
        assert str(case.pool) == "a: serves (1 running); b: serves (2 running)"

    asyncio.run(run())


def test_empty_pool_is_refused():
    with pytest.raises(ValueError, match="at least one engine"):
        EnginePool({})
