"""SGLang's HTTP server, stock, its weights replaced from this process."""

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang_server import HEADERS, KEY, PROMPT, SAMPLING, Server, serving
from tidemill_testing import tiny_model
from tidemill_weight_update import GroupLink, WeightUpdater
from tidemill_weight_update.sglang import HttpEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]


class StockHttpEngine(HttpEngine):
    """Of a server that somebody else launched."""

    has_loader = False


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    """Three of one architecture: what the server starts with, and two to send."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return [tiny_model(folder / str(seed), "qwen3", seed=seed, num_hidden_layers=3) for seed in range(3)]


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict[Path, list[int]]:
    """Transformers' greedy continuation of PROMPT for each checkpoint."""
    import transformers

    def greedy(path: Path) -> list[int]:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        length = SAMPLING["max_new_tokens"]
        out = model.generate(torch.tensor([PROMPT]), max_new_tokens=length, do_sample=False, eos_token_id=None)
        return out[0, len(PROMPT) :].tolist()

    return {path: greedy(path) for path in checkpoints}


@pytest.fixture(scope="module")
def server(checkpoints) -> Iterator[Server]:
    with serving(checkpoints[0]) as started:
        yield started


def state(path: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(path / "model.safetensors").items())


def check_updates(server: Server, checkpoints: list[Path], expected: dict[Path, list[int]], tp_size: int) -> None:
    """Both paths, and a link, give the same weights: to the last bit of the log-probabilities."""
    logprobs = []
    for client, link in ((HttpEngine, None), (StockHttpEngine, None), (HttpEngine, GroupLink())):
        engine = client(server.url, api_key=KEY)
        assert (engine.tp_size, HttpEngine(server.url, api_key=KEY).has_loader) == (tp_size, True)
        updater = WeightUpdater([engine], bucket_bytes=1 << 16, link=link)
        for version, path in enumerate((checkpoints[1], checkpoints[2])):
            stats = updater.update(state(path), version)
            assert stats.verified == (client is HttpEngine)
            out = server.generate(return_logprob=True)
            assert (out["output_ids"], out["meta_info"]["weight_version"]) == (expected[path], str(version))
            logprobs.append(out["meta_info"]["output_token_logprobs"])
        updater.close()
    assert logprobs[:2] == logprobs[2:4] == logprobs[4:]


def test_updates_over_http(server, checkpoints, expected):
    check_updates(server, checkpoints, expected, tp_size=1)


def test_updates_of_two_tensor_parallel_ranks(checkpoints, expected):
    with serving(checkpoints[0], tp_size=2) as two:
        check_updates(two, checkpoints, expected, tp_size=2)


def leave(server: Server) -> None:
    """A client goes away from a request that runs."""
    with contextlib.closing(server.connect()) as connection:
        body = {"input_ids": PROMPT, "sampling_params": SAMPLING | {"max_new_tokens": 60}, "stream": True}
        connection.request("POST", "/generate", json.dumps(body), HEADERS)
        assert connection.getresponse().readline().startswith(b"data:")


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_requests_come_and_go_during_updates(server, checkpoints, expected, in_flight):
    """SGLang ends if it is to flush its cache while a request runs, and one that its client has left does."""
    ended = threading.Event()

    def call_on(num_tokens: int) -> set[int]:
        body = {"input_ids": PROMPT, "sampling_params": SAMPLING | {"max_new_tokens": num_tokens}}
        statuses = set()
        while not ended.is_set():
            statuses.add(server.request("POST", "/generate", body)[0])
        return statuses

    updater = WeightUpdater([HttpEngine(server.url, api_key=KEY)], in_flight=in_flight)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(call_on, num_tokens) for num_tokens in (3, 7, 12)]
        try:
            for version in range(6):
                leave(server)
                path = checkpoints[1 + version % 2]
                assert updater.update(state(path), version).quarantined == {}
                out = server.generate()
                assert (out["output_ids"], out["meta_info"]["weight_version"]) == (expected[path], str(version))
        finally:
            ended.set()
    assert all(200 in call.result() for call in calls)  # others were ended
    updater.close()


def test_a_server_refuses_a_wrong_key(server):
    with pytest.raises(RuntimeError, match=r"HTTP 401 .*check api_key"):
        HttpEngine(server.url, api_key="wrong").flush_cache()


def test_a_cache_that_running_requests_hold_is_an_error(server, checkpoints, expected):
    updater = WeightUpdater([StockHttpEngine(server.url, api_key=KEY, timeout_s=10)])
    with contextlib.closing(server.connect()) as running:
        body = {"input_ids": PROMPT, "sampling_params": SAMPLING | {"max_new_tokens": 480}, "stream": True}
        running.request("POST", "/generate", json.dumps(body), HEADERS)
        stream = running.getresponse()
        assert stream.readline().startswith(b"data:")  # the request runs
        assert server.request("POST", "/pause_generation", {"mode": "in_place"})[0] == 200
        try:
            with pytest.raises(RuntimeError, match=r"engine 0 of 1 .*did not flush its prefix cache.*HTTP 400"):
                updater.update(state(checkpoints[0]), "paused")
        finally:
            assert server.request("POST", "/continue_generation", {})[0] == 200
        assert stream.read().rstrip().endswith(b"[DONE]")
    updater.update(state(checkpoints[0]), "free")
    out = server.generate()
    assert (out["output_ids"], out["meta_info"]["weight_version"]) == (expected[checkpoints[0]], "free")
