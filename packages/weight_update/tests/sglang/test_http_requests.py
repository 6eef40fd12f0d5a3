"""SGLang's HTTP server with requests that come, run and are left while its weights are replaced."""

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
from sglang_server import HEADERS, KEY, Server, serving
from tidemill_testing import tiny_model
from tidemill_weight_update import GroupLink, WeightUpdater
from tidemill_weight_update.control.request import TOKEN_VARIABLE, new_token
from tidemill_weight_update.sglang import HttpEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [1 + (7 * index) % 120 for index in range(64)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    """Two of one architecture."""
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
def running(server: Server, num_tokens: int) -> Iterator[Callable[[], bytes]]:
    """A request that has answered its first token; its client goes away in the end. Yields what reads on to its end."""
    with contextlib.closing(server.connect()) as connection:
        connection.request("POST", "/generate", json.dumps(body(num_tokens, stream=True)), HEADERS)
        stream = connection.getresponse()
        assert stream.readline().startswith(b"data:")
        yield stream.read


@dataclass(frozen=True)
class Answer:
    status: int
    out: dict[str, Any]
    began: float


def call(server: Server, num_tokens: int) -> Answer:
    began = time.monotonic()
    return Answer(*server.request("POST", "/generate", body(num_tokens)), began)


@contextmanager
def callers(server: Server) -> Iterator[list[Answer]]:
    """Clients that ask for the same prompt again and again. Their answers are there in the end."""
    ended = threading.Event()
    answers: list[Answer] = []

    def call_on(num_tokens: int) -> None:
        while not ended.is_set():
            answers.append(call(server, num_tokens))

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call_on, num_tokens) for num_tokens in (1, 3, 12, 40)]
        try:
            yield answers
        finally:
            ended.set()
    for each in calls:
        each.result()


class Slow(HttpEngine):
    """Comes to its version late, as if there were other engines."""

    def set_weight_version(self, version: str) -> None:
        time.sleep(0.2)
        super().set_weight_version(version)


def check(answers: list[Answer], models: list[Any]) -> None:
    """Each is of one version, the one that it names: nothing of it was read by other weights. None was ended."""
    given = {(int(version_of(a.out)), tuple(a.out["output_ids"])) for a in answers if a.status == 200}
    assert [each for each in given if list(each[1]) != most_likely(models[each[0] % 2], PROMPT, list(each[1]))] == []
    assert {a.status for a in answers} == {200}


@pytest.mark.parametrize("link", [None, GroupLink()], ids=["on this machine", "as if on another"])
def test_every_answer_is_of_the_version_that_it_names(server, models, link):
    """Also of requests that run when the update begins, and of those that come meanwhile."""
    updater = WeightUpdater([Slow(server.url, api_key=KEY)], link=link)
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
    check(answers, models)
    versions = [(a, int(version_of(a.out))) for a in answers]
    assert {version for a, version in versions if started[version] < a.began < updated[version]} == set(range(1, 9))
    assert len(answers) > 40


def test_requests_that_come_while_one_without_a_client_still_runs_find_no_old_cache(server, models):
    """SGLang's lock does not wait for it, and cannot empty the cache before it has ended."""
    updater = WeightUpdater([HttpEngine(server.url, api_key=KEY)], bucket_bytes=1 << 16)
    updater.update(state(models[0]), 0)
    answers = []

    def sent(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(state(models[version % 2])):
            if index == 20:  # the load has begun
                calls.extend(pool.submit(call, server, num_tokens) for num_tokens in [2] * 4 + [12] * 4)
                time.sleep(0.2)
            yield item

    with ThreadPoolExecutor(8) as pool:
        for version in range(1, 9):
            generate(server)  # its prompt is in the cache
            calls: list[Future[Answer]] = []
            clients = contextlib.ExitStack()
            for _ in range(8):
                clients.enter_context(running(server, 400))
            leaving = threading.Timer(0.1, clients.close)  # while the load waits for them
            leaving.start()
            assert updater.update(sent(version), version).quarantined == {}
            leaving.join()
            answers += [each.result(60) for each in calls]
            assert {version_of(a.out) for a in answers[-8:]} == {str(version)}
    updater.close()
    check(answers, models)


def test_a_request_that_keeps_the_cache_from_being_emptied_is_ended(server, models):
    """With those that came since: SGLang cannot tell them apart. One that runs stands for one that SGLang did not end
    in time when its client left."""
    engine = HttpEngine(server.url, api_key=KEY)
    with running(server, 400) as read, ThreadPoolExecutor(1) as pool:
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
    """Has sent the first model as version "good"; in the end the server goes on with it."""
    updater = WeightUpdater([HttpEngine(server.url, api_key=KEY)], bucket_bytes=1 << 16)
    updater.update(state(models[0]), "good")
    yield updater
    assert version_of(generate(server)) == "good"
    out = generate(server)["output_ids"]
    assert out == most_likely(models[0], PROMPT, out)
    updater.close()


def test_a_refused_update_leaves_the_server_going(updater, models, monkeypatch):
    with pytest.raises(RuntimeError, match="no tensor was sent for these parameters"):
        updater.update(state(models[1])[1:], "bad")
    monkeypatch.setenv(TOKEN_VARIABLE, new_token())
    with pytest.raises(RuntimeError, match="its ranks did not report: the loader refused the request"):
        updater.update(state(models[1]), "bad")


def test_a_trainer_that_fails_half_way_leaves_the_server_paused(server, updater, models):
    def failing():
        yield from state(models[1])[:20]
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        updater.update(failing(), "bad")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, server)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        updater.update(state(models[0]), "good")
        assert version_of(waiting.result(20)) == "good"


class Interrupted(HttpEngine):
    """The trainer is interrupted when requests are held back and the server has begun to copy."""

    def hold(self) -> None:
        super().hold()
        time.sleep(1)
        _thread.interrupt_main()


def test_an_interrupted_trainer_leaves_the_server_paused(server, models, updater, ctrl_c):
    interrupted = WeightUpdater([Interrupted(server.url, api_key=KEY)])
    with pytest.raises(KeyboardInterrupt):
        interrupted.update(state(models[1]), "bad")
    interrupted.close()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, server)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        updater.update(state(models[0]), "good", engines=[HttpEngine(server.url, api_key=KEY)])
        assert version_of(waiting.result(20)) == "good"


def test_a_trainer_that_is_interrupted_before_the_load_begins_leaves_the_server_going(server, updater, ctrl_c, models):
    with running(server, 400) as read:
        timer = threading.Timer(0.1, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            updater.update(state(models[1]), "bad")
        assert read().rstrip().endswith(b"[DONE]")
