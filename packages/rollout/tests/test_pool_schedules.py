"""Random schedules of requests, deaths and restarts in a pool of engines."""

import asyncio
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import PROMPT, Case, HeldEngine, reply, settle
from tidemill_rollout import EngineError, Generation, SamplingParams

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["start"] * 4 + ["finish", "finish", "fail", "cancel", "die", "restart"]),
        st.integers(0, 5),
        st.integers(0, 3),
    ),
    max_size=40,
)


class Schedule(Case):
    """Random operations on a pool, with its own account of deaths and requests."""

    def __init__(self) -> None:
        super().__init__("abc")
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
        elif action == "restart":
            engine.die()
            self.engines[name] = HeldEngine()
            self.pool.add(name, self.engines[name])
            calls[name] = 0
            self.known_dead.discard(name)
        await settle()
        self.check(calls)

    def check(self, calls: dict[str, int]) -> None:
        metrics = self.pool.metrics()
        for name, engine in self.engines.items():
            started = len(engine.calls) - calls[name]
            if started:
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
            self.pool.add(name, self.engines[name])
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
def test_random_schedules_keep_the_counts_and_use_only_live_engines(operations):
    async def run():
        schedule = Schedule()
        for operation in operations:
            await schedule.apply(*operation)
        await schedule.check_results()

    asyncio.run(run())
