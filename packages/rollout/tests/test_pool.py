"""The pool of engines: routing, weight versions and engines that die."""

import asyncio
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tidemill_rollout import EngineDiedError, EngineError, EnginePool, Generation, SamplingParams

PROMPT = (5, 6, 7)
SAMPLING = SamplingParams(max_tokens=4, seed=11)


class HeldEngine:
    """An engine whose requests run until the test finishes them. Its tokens depend on prompt and seed alone.

    Attributes:
        running: running requests in the order of their start, with the id of their session.
        calls: id of the session of each request.
        is_dead: every call fails.
    """

    def __init__(self) -> None:
        self.running: list[tuple[str, asyncio.Future[None]]] = []
        self.calls: list[str] = []
        self.is_dead = False

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        self.calls.append(session_id)
        if self.is_dead:
            raise EngineDiedError("connection refused")
        entry = session_id, asyncio.get_running_loop().create_future()
        self.running.append(entry)
        try:
            await entry[1]
        finally:
            self.running.remove(entry)
        return reply(token_ids, sampling)

    def finish(self, number: int = 0, error: Exception | None = None) -> None:
        future = self.running[number][1]
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def die(self) -> None:
        self.is_dead = True
        for _, future in self.running:
            future.set_exception(EngineDiedError("connection reset"))


def reply(token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
    tokens = [(sum(token_ids) * 31 + (sampling.seed or 0) * 7 + i) % 97 for i in range(sampling.max_tokens or 0)]
    return Generation(token_ids=tokens, log_probs=[-1.0] * len(tokens), finish_reason="length", versions=[("0", 4)])


async def settle() -> None:
    """Let all tasks run until each of them waits for an engine or for the pool."""
    for _ in range(20):
        await asyncio.sleep(0)


class Case:
    """A pool of held engines "a", "b", ..., and the requests to it."""

    def __init__(self, names: str = "ab") -> None:
        self.engines = {name: HeldEngine() for name in names}
        self.pool = EnginePool(self.engines)

    async def start(self, session_id: str, sampling: SamplingParams = SAMPLING) -> asyncio.Task[Generation]:
        task = asyncio.ensure_future(self.pool.generate(PROMPT, sampling, session_id=session_id))
        await settle()
        return task

    def sessions(self, name: str) -> list[str]:
        return [session_id for session_id, _ in self.engines[name].running]


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
        case.pool.add("c", HeldEngine(), 0)
        for _ in range(3):
            await case.start("s0")
        assert case.sessions("a") == ["s0"] * 3

    asyncio.run(run())


def test_only_engines_with_the_newest_version_receive_requests():
    async def run():
        case = Case()
        await case.start("s0")
        case.pool.set_version("b", 1)
        for session_id in ("s0", "s1", "s2"):
            await case.start(session_id)
        assert case.sessions("a") == ["s0"]
        assert case.sessions("b") == ["s0", "s1", "s2"]
        case.pool.set_version("a", 1)
        await case.start("s3")
        assert case.sessions("a") == ["s0", "s3"]

    asyncio.run(run())


def test_requests_wait_while_no_engine_has_the_newest_version():
    async def run():
        case = Case()
        case.pool.set_version("a", 1)
        case.engines["a"].die()
        task = await case.start("s0")
        assert case.pool.metrics()["num_waiting"] == 1
        assert case.pool.metrics()["num_engines"] == 0
        assert str(case.pool) == "a: failed: connection refused; b: waits for version 1 (version 0, 0 running)"
        case.pool.set_version("b", 1)
        await settle()
        assert case.sessions("b") == ["s0"]
        assert case.pool.metrics()["num_waiting"] == 0
        case.engines["b"].finish()
        await task

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


def test_requests_wait_for_a_restart_where_the_pool_awaits_one():
    async def check():
        engine = HeldEngine()
        pool = EnginePool({"a": engine}, awaits_restart=True)
        task = asyncio.create_task(pool.generate(PROMPT, SAMPLING, session_id="s"))
        await settle()
        engine.die()
        await settle()
        assert pool.metrics()["num_waiting"] == 1
        again = HeldEngine()
        pool.add("a", again, version=0)
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


def test_waiting_request_fails_when_the_last_engine_dies():
    async def run():
        case = Case()
        await case.start("s0")
        old = await case.start("s1")
        case.pool.set_version("a", 1)
        case.engines["a"].die()
        waiting = await case.start("s2")
        assert case.pool.metrics()["num_waiting"] == 2  # s0 and s2; s1 still runs with the old weights
        case.engines["b"].die()
        for task in (old, waiting):
            with pytest.raises(EngineDiedError, match="none of 2 engines is left"):
                await task

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


def test_restarted_engine_receives_requests_after_it_has_the_newest_version():
    async def run():
        case = Case()
        case.pool.set_version("a", 1)
        case.pool.set_version("b", 1)
        await case.start("s0")
        case.engines["a"].die()
        await settle()
        case.pool.set_version("a", 1)  # verified before it died
        await case.start("s1")
        assert case.sessions("b") == ["s0", "s1"]
        case.engines["a"] = HeldEngine()
        case.pool.add("a", case.engines["a"], 0)
        await case.start("s2")
        assert case.sessions("b") == ["s0", "s1", "s2"]
        case.pool.set_version("a", 1)
        await case.start("s3")
        assert case.sessions("a") == ["s3"]

    asyncio.run(run())


def test_unknown_engine_and_empty_pool_are_refused():
    with pytest.raises(ValueError, match="no engine 'c', only a, b; add it first"):
        Case().pool.set_version("c", 1)
    with pytest.raises(ValueError, match="at least one engine"):
        EnginePool({})


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["start"] * 4 + ["finish", "finish", "fail", "cancel", "die", "version", "restart"]),
        st.integers(0, 5),
        st.integers(0, 3),
    ),
    max_size=40,
)


class Schedule(Case):
    """Random operations on a pool, with its own account of versions, deaths and requests."""

    def __init__(self) -> None:
        super().__init__("abc")
        self.versions = dict.fromkeys("abc", 0)
        self.newest = 0
        self.tasks: list[tuple[SamplingParams, asyncio.Task[Generation]]] = []
        self.known_dead: set[str] = set()

    async def apply(self, action: str, number: int, other: int) -> None:
        name = "abc"[number % 3]
        engine = self.engines[name]
        calls = {name: len(engine.calls) for name, engine in self.engines.items()}
        if action == "start":
            sampling = SamplingParams(max_tokens=4, seed=len(self.tasks))
            self.tasks.append((sampling, await self.start(f"s{other}", sampling)))
        elif action in ("finish", "fail") and engine.running:
            error = None if action == "finish" else EngineError("no log-probs")
            engine.finish(other % len(engine.running), error)
        elif action == "cancel" and self.tasks:
            self.tasks[(number * 4 + other) % len(self.tasks)][1].cancel()
        elif action == "die":
            engine.die()
        elif action == "version":
            self.pool.set_version(name, other)
            self.versions[name] = other
        elif action == "restart":
            engine.die()
            self.engines[name] = HeldEngine()
            self.pool.add(name, self.engines[name], other)
            self.versions[name], calls[name] = other, 0
            self.known_dead.discard(name)
        self.newest = max(self.newest, *self.versions.values())
        await settle()
        self.check(calls)

    def check(self, calls: dict[str, int]) -> None:
        metrics = self.pool.metrics()
        for name, engine in self.engines.items():
            started = len(engine.calls) - calls[name]
            if started:
                assert self.versions[name] == self.newest
                assert name not in self.known_dead
            if engine.is_dead and started:
                self.known_dead.add(name)
            assert metrics[f"num_running/{name}"] == len(engine.running)
        unfinished = sum(not task.done() for _, task in self.tasks)
        running = sum(len(engine.running) for engine in self.engines.values())
        assert metrics["num_waiting"] == unfinished - running

    async def check_results(self) -> None:
        for name, engine in self.engines.items():
            engine.die()
            self.engines[name] = HeldEngine()
            self.pool.add(name, self.engines[name], self.newest)
        await settle()
        for engine in self.engines.values():
            for number in range(len(engine.running)):
                engine.finish(number)
        results = await asyncio.gather(*(task for _, task in self.tasks), return_exceptions=True)
        for (sampling, _), result in zip(self.tasks, results, strict=True):
            if isinstance(result, EngineError):
                assert re.search("no log-probs|none of 3 engines is left|3 engines died one after another", str(result))
            elif not isinstance(result, asyncio.CancelledError):
                assert result == reply(PROMPT, sampling)
        assert self.pool.metrics()["num_waiting"] == 0


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_random_schedules_keep_the_counts_and_use_only_live_engines_with_the_newest_version(operations):
    async def run():
        schedule = Schedule()
        for operation in operations:
            await schedule.apply(*operation)
        await schedule.check_results()

    asyncio.run(run())
