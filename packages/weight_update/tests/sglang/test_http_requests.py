"""SGLang HTTP server with requests that start, run and are abandoned during updates."""

import _thread
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference_answers import most_likely, state
from sglang_server import HEADERS, Server, serving
from sources import WithEvent, fail
from tidemill_testing import tiny_model
from tidemill_testing.sglang_server import API_KEY
from tidemill_weight_update import GroupLink, WeightUpdater
from tidemill_weight_update.sglang import HttpEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [1 + (7 * index) % 120 for index in range(64)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    """Two checkpoints of one architecture."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return [tiny_model(folder / str(seed), "qwen3", seed=seed, num_hidden_layers=3) for seed in range(2)]


@pytest.fixture(scope="module")
def models(checkpoints) -> list[Any]:
    return [transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in checkpoints]


@pytest.fixture(scope="module")
def server(checkpoints) -> Iterator[Server]:
    with serving(checkpoints[0]) as started:
        yield started


def body(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": GREEDY | {"max_new_tokens": num_tokens}} | fields


def generate(server: Server, num_tokens: int = 24) -> dict[str, Any]:
    status, out = server.request("POST", "/generate", body(num_tokens))
    assert status == 200, out
    return out


def version_of(out: dict[str, Any]) -> str:
    return out["meta_info"]["weight_version"]


@contextmanager
def running_request(server: Server, num_tokens: int) -> Iterator[Callable[[], bytes]]:
    """Start a request and wait for its first token; yield a function that reads the rest. Abandon it at the end."""
    with contextlib.closing(server.connect()) as connection:
        connection.request("POST", "/generate", json.dumps(body(num_tokens, stream=True)), HEADERS)
        stream = connection.getresponse()
        assert stream.readline().startswith(b"data:")
        yield stream.read


@dataclass(frozen=True)
class Answer:
    status: int
    out: dict[str, Any]
    started_at: float


def call(server: Server, num_tokens: int) -> Answer:
    started_at = time.monotonic()
    return Answer(*server.request("POST", "/generate", body(num_tokens)), started_at)


@contextmanager
def callers(server: Server) -> Iterator[list[Answer]]:
    """Run clients that send the same prompt repeatedly; yield the list that gets their answers."""
    stop = threading.Event()
    answers: list[Answer] = []

    def call_repeatedly(num_tokens: int) -> None:
        while not stop.is_set():
            answers.append(call(server, num_tokens))

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call_repeatedly, num_tokens) for num_tokens in (1, 3, 12, 40)]
        try:
            yield answers
        finally:
            stop.set()
    for each in calls:
        each.result()


class SlowVersionEngine(HttpEngine):
    """Client that sets its version late, as if there were other engines."""

    def set_weight_version(self, version: str) -> None:
        time.sleep(0.2)
        super().set_weight_version(version)


def check_answers(answers: list[Answer], models: list[Any]) -> None:
    """Check that each answer was computed completely by the version that it reports, and that none was aborted."""
    answered = {(int(version_of(a.out)), tuple(a.out["output_ids"])) for a in answers if a.status == 200}
    assert [each for each in answered if list(each[1]) != most_likely(models[each[0] % 2], PROMPT, list(each[1]))] == []
    assert {a.status for a in answers} == {200}


@pytest.mark.parametrize("link", [None, GroupLink()], ids=["on this machine", "as if on another"])
def test_every_answer_is_computed_by_the_version_that_it_reports(server, models, link):
    """Including requests that run when the update starts, and requests that arrive during it."""
    updater = WeightUpdater([SlowVersionEngine(server.url, api_key=API_KEY)], link=link)
    updater.update(state(models[0]), 0)
    started, updated = {0: time.monotonic()}, {0: time.monotonic()}
    with callers(server) as answers:
        for version in range(1, 9):
            time.sleep(0.1)
            started[version] = time.monotonic()
            assert updater.update(state(models[version % 2]), version).quarantined == {}
            updated[version] = time.monotonic()
            assert version_of(generate(server)) == str(version)
    updater.close()
    check_answers(answers, models)
    versions = [(a, int(version_of(a.out))) for a in answers]
    assert {version for a, version in versions if started[version] < a.started_at < updated[version]} == set(
        range(1, 9)
    )
    assert len(answers) > 40


def test_requests_during_a_load_with_abandoned_requests_get_no_stale_cache(server, models):
    """SGLang's lock does not wait for abandoned requests, and cannot flush the cache before they end."""
    updater = WeightUpdater([HttpEngine(server.url, api_key=API_KEY)], bucket_bytes=1 << 16)
    updater.update(state(models[0]), 0)
    answers = []

    def start_requests() -> None:
        calls.extend(pool.submit(call, server, num_tokens) for num_tokens in [2] * 4 + [12] * 4)
        time.sleep(0.2)

    with ThreadPoolExecutor(8) as pool:
        for version in range(1, 9):
            generate(server)  # its prompt is in the cache
            calls: list[Future[Answer]] = []
            clients = contextlib.ExitStack()
            for _ in range(8):
                clients.enter_context(running_request(server, 400))
            abandoning = threading.Timer(0.1, clients.close)  # while the load waits for them
            abandoning.start()
            assert updater.update(WithEvent(state(models[version % 2]), 20, start_requests), version).quarantined == {}
            abandoning.join()
            answers += [each.result(60) for each in calls]
            assert {version_of(a.out) for a in answers[-8:]} == {str(version)}
    updater.close()
    check_answers(answers, models)


def test_request_that_blocks_the_cache_flush_is_aborted(server, models):
    """Requests that arrived since are aborted as well: SGLang cannot distinguish them. The running request simulates
    one whose client is gone and that SGLang has not aborted in time."""
    engine = HttpEngine(server.url, api_key=API_KEY)
    with running_request(server, 400) as read, ThreadPoolExecutor(1) as pool:
        engine.hold()
        waiting: Future[tuple[int, Any]] = pool.submit(server.request, "POST", "/generate", body(24))
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        engine.flush_cache()
        assert b'"abort"' in read()
        engine.resume()
        status, out = waiting.result(20)
        assert (status, "was aborted" in out["error"]["message"]) == (499, True)
    out = generate(server)
    assert (len(out["output_ids"]), out["meta_info"]["cached_tokens"]) == (24, 0)


@pytest.fixture
def updater(server, models) -> Iterator[WeightUpdater]:
    """Updater that has sent the first model as version "good"; at the end the server must run with it."""
    updater = WeightUpdater([HttpEngine(server.url, api_key=API_KEY)], bucket_bytes=1 << 16)
    updater.update(state(models[0]), "good")
    yield updater
    assert version_of(generate(server)) == "good"
    out = generate(server)["output_ids"]
    assert out == most_likely(models[0], PROMPT, out)
    updater.close()


def test_refused_update_leaves_the_server_running(updater, models):
    with pytest.raises(RuntimeError, match="no tensor was sent for these parameters"):
        updater.update(state(models[1])[1:], "bad")


def test_trainer_that_fails_during_an_update_leaves_the_server_paused(server, updater, models):
    failing = WithEvent(state(models[1]), 20, fail(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        updater.update(failing, "bad")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, server)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        updater.readmit([HttpEngine(server.url, api_key=API_KEY)], state(models[0]), "good")
        assert version_of(waiting.result(20)) == "good"


class InterruptingEngine(HttpEngine):
    """Client that interrupts the trainer while requests are held and the server copies weights."""

    def hold(self) -> None:
        super().hold()
        time.sleep(1)
        _thread.interrupt_main()


def test_interrupt_during_the_load_leaves_the_server_paused(server, models, updater, ctrl_c):
    interrupted = WeightUpdater([InterruptingEngine(server.url, api_key=API_KEY)])
    with pytest.raises(KeyboardInterrupt):
        interrupted.update(state(models[1]), "bad")
    interrupted.close()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, server)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        updater.readmit([HttpEngine(server.url, api_key=API_KEY)], state(models[0]), "good")
        assert version_of(waiting.result(20)) == "good"


def test_interrupt_before_the_load_leaves_the_server_running(server, updater, ctrl_c, models):
    with running_request(server, 400) as read:
        timer = threading.Timer(0.1, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            updater.update(state(models[1]), "bad")
        assert read().rstrip().endswith(b"[DONE]")
