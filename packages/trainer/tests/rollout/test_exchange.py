"""Requests between episode workers and engines in other Ray actors."""

import asyncio
import sys

import pytest
import ray
from tidemill_rollout import EngineError, Generation, SamplingParams
from tidemill_trainer.rollout.exchange import Mailbox, serve

pytestmark = pytest.mark.ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class CountingEngine:
    """Replies with the number of running requests, after all of a batch have started; waits for prompts [0]."""

    def __init__(self):
        self.running = 0
        self.cancelled = 0

    async def generate(self, token_ids, sampling, *, session_id):
        if token_ids == [1]:
            raise EngineError("token 1 is not supported")
        self.running += 1
        try:
            await asyncio.sleep(3600 if token_ids == [0] else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return Generation(
            token_ids=[token + 1 for token in token_ids],
            log_probs=[-1.0] * len(token_ids),
            finish_reason="stop",
            versions=[("3", len(token_ids))],
        )


@ray.remote(num_cpus=0)
class Worker:
    """An episode worker with one mailbox."""

    async def start(self):
        self.mailbox = Mailbox("engine 0")
        self.calls = {"take": 0, "give": 0}

    async def take(self, number):
        self.calls["take"] += 1
        return await self.mailbox.take()

    async def give(self, number, results):
        self.calls["give"] += 1
        self.mailbox.give(results)

    async def fail(self, number, reason):
        self.mailbox.fail(reason)

    async def generate(self, prompts, timeout_s=60):
        async with asyncio.timeout(timeout_s):
            requests = [self.mailbox.generate(p, SamplingParams(), session_id="s") for p in prompts]
            return [
                result if isinstance(result, Exception) else list(result.token_ids)
                for result in await asyncio.gather(*requests, return_exceptions=True)
            ]

    async def cancel_one(self):
        task = asyncio.create_task(self.mailbox.generate([0], SamplingParams(), session_id="s"))
        await self.mailbox.generate([5], SamplingParams(), session_id="s")  # the engine has received [0], too
        task.cancel()
        await asyncio.wait({task})

    async def num_calls(self):
        return self.calls


@ray.remote(num_cpus=0)
class EngineHost:
    async def start(self, worker):
        self.engine = CountingEngine()
        self.serving = asyncio.create_task(serve(self.engine, worker, 0))

    async def counts(self):
        return self.engine.running, self.engine.cancelled

    async def wait_until_served(self):
        await self.serving


def start_actors():
    worker, host = Worker.remote(), EngineHost.remote()
    ray.get(worker.start.remote())
    ray.get(host.start.remote(worker))
    return worker, host


@pytest.fixture(scope="module")
def actors(ray_cluster):
    return start_actors()


def test_results_return_to_their_requests_in_few_calls(actors):
    worker, _ = actors
    prompts = [[number, 2 * number] for number in range(2, 502)]
    assert ray.get(worker.generate.remote(prompts)) == [[a + 1, b + 1] for a, b in prompts]
    calls = ray.get(worker.num_calls.remote())
    assert calls["take"] + calls["give"] < 50


def test_error_of_one_request_reaches_that_request_alone(actors):
    worker, _ = actors
    first, second = ray.get(worker.generate.remote([[1], [7]]))
    assert isinstance(first, EngineError)
    assert str(first) == "token 1 is not supported"
    assert second == [8]


def test_cancelled_request_is_cancelled_in_the_engine(actors):
    worker, host = actors
    ray.get(worker.cancel_one.remote())
    assert ray.get(worker.generate.remote([[5]])) == [[6]]  # later than the cancellation
    assert ray.get(host.counts.remote()) == (0, 1)


def test_requests_of_a_killed_worker_are_cancelled(ray_cluster):
    worker, host = start_actors()
    pending = worker.generate.remote([[0], [0]])
    assert ray.get(worker.generate.remote([[5]])) == [[6]]
    assert ray.get(host.counts.remote())[0] == 2
    ray.kill(worker)
    ray.get(host.wait_until_served.remote(), timeout=60)
    assert ray.get(host.counts.remote()) == (0, 2)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(pending)


@pytest.mark.parametrize("ends", ["give", "fail"])
def test_requests_that_are_cancelled_at_that_moment_do_not_keep_others_from_their_end(ends):
    async def run():
        mailbox = Mailbox("engine 3")
        tasks = [asyncio.create_task(mailbox.generate([n], SamplingParams(), session_id="s")) for n in range(3)]
        await asyncio.sleep(0)
        requests, _ = await mailbox.take()
        tasks[0].cancel()  # its future is cancelled at once, and the request a step of the loop later
        if ends == "give":
            mailbox.give([(request.id, EngineError("full")) for request in requests])
        else:
            mailbox.fail("died")
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    found = asyncio.run(run())
    assert isinstance(found[0], asyncio.CancelledError)
    assert ["full" in str(error) or "died" in str(error) for error in found[1:]] == [True, True]


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


class FailingEngine:
    async def generate(self, token_ids, sampling, *, session_id):
        raise UnpicklableError


@ray.remote(num_cpus=0)
class FailingHost:
    async def serve(self, worker):
        await serve(FailingEngine(), worker, 0)


def test_result_that_cannot_be_sent_stops_the_engine_for_the_worker_at_once(ray_cluster):
    worker, host = Worker.remote(), FailingHost.remote()
    ray.get(worker.start.remote())
    serving = host.serve.remote(worker)
    [error] = ray.get(worker.generate.remote([[5]]), timeout=60)
    assert "engine 0 has stopped" in str(error)
    with pytest.raises(ray.exceptions.RayTaskError, match="pickle"):
        ray.get(serving, timeout=60)


def test_stopped_engine_fails_waiting_and_later_requests():
    async def run():
        mailbox = Mailbox("engine 3")
        waiting = asyncio.create_task(mailbox.generate([5], SamplingParams(), session_id="s"))
        await mailbox.take()
        mailbox.fail("killed")
        with pytest.raises(EngineError, match="engine 3 has stopped: killed"):
            await waiting
        with pytest.raises(EngineError, match="engine 3 has stopped"):
            await mailbox.generate([5], SamplingParams(), session_id="s")

    asyncio.run(run())


def test_restarted_engine_receives_the_requests_that_come_after_its_restart():
    """A call of the engine that died, which may still wait, takes none of them."""

    async def run():
        mailbox = Mailbox("engine 3")
        stale = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.fail("killed")
        assert await stale == await mailbox.take() == ([], [])
        assert mailbox.reopen()
        assert not mailbox.reopen()
        waiting = asyncio.create_task(mailbox.generate([5], SamplingParams(), session_id="s"))
        await asyncio.sleep(0)
        [request], cancelled = await mailbox.take()
        generation = Generation(token_ids=[6], log_probs=[-1.0], finish_reason="stop", versions=[("3", 1)])
        mailbox.give([(request.id, generation)])
        assert (await waiting, cancelled) == (generation, [])

    asyncio.run(run())


def test_closed_mailbox_opens_once_and_is_drained_when_all_requests_are_answered():
    async def run():
        mailbox = Mailbox("engine 3", is_open=False)
        with pytest.raises(EngineError, match="engine 3 has not started"):
            await mailbox.generate([5], SamplingParams(), session_id="s")
        assert mailbox.reopen()
        await mailbox.drained()
        tasks = [asyncio.create_task(mailbox.generate([5], SamplingParams(), session_id="s")) for _ in range(3)]
        await asyncio.sleep(0)
        draining = asyncio.create_task(mailbox.drained())
        requests, _ = await mailbox.take()
        generation = Generation(token_ids=[6], log_probs=[-1.0], finish_reason="stop", versions=[("3", 1)])
        mailbox.give([(requests[0].id, generation)])
        tasks[1].cancel()
        await asyncio.wait(tasks[:2])
        assert not draining.done()
        mailbox.give([(requests[2].id, generation)])
        await draining
        assert await tasks[2] == generation

    asyncio.run(run())


def test_request_that_is_cancelled_before_the_engine_fetches_it_is_not_sent():
    async def run():
        mailbox = Mailbox("engine 0")
        calls = [asyncio.create_task(mailbox.generate([n], SamplingParams(), session_id="s")) for n in range(3)]
        await asyncio.sleep(0)
        calls[1].cancel()
        await asyncio.wait({calls[1]})
        new, _ = await mailbox.take()
        for call in calls:
            call.cancel()
        return [request.token_ids for request in new]

    assert asyncio.run(run()) == [[0], [2]]
