"""Stock SGLang HTTP server, updated from this process."""

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang_server import HEADERS, PROMPT, SAMPLING, Server, serving
from tidemill_testing import tiny_model
from tidemill_testing.sglang_server import API_KEY
from tidemill_weight_update import GroupLink, WeightUpdater
from tidemill_weight_update.sglang import HttpEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]


class StockHttpEngine(HttpEngine):
    """Client of a server that was launched without the fast loader."""

    has_loader = False


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    """Three checkpoints of one architecture: the server starts with the first, the others are sent."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return [tiny_model(folder / str(seed), "qwen3", seed=seed, num_hidden_layers=3) for seed in range(3)]


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict[Path, list[int]]:
    """Greedy continuation of PROMPT by transformers, for each checkpoint."""
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
    """Check that both paths and a link give bitwise the same log-probabilities."""
    logprobs = []
    for client, link in ((HttpEngine, None), (StockHttpEngine, None), (HttpEngine, GroupLink())):
        engine = client(server.url, api_key=API_KEY)
        assert (engine.tp_size, HttpEngine(server.url, api_key=API_KEY).has_loader) == (tp_size, True)
        updater = WeightUpdater([engine], bucket_bytes=1 << 16, link=link)
        for version, path in enumerate((checkpoints[1], checkpoints[2])):
            stats = updater.update(state(path), version)
            assert stats.verified == (client is HttpEngine)
            out = server.generate(return_logprob=True)
            assert (out["output_ids"], out["meta_info"]["weight_version"]) == (expected[path], str(version))
            logprobs.append(out["meta_info"]["output_token_logprobs"])
        updater.close()
    assert logprobs[:2] == logprobs[2:4] == logprobs[4:]


def test_all_paths_give_the_same_logprobs_over_http(server, checkpoints, expected):
    check_updates(server, checkpoints, expected, tp_size=1)


def test_all_paths_give_the_same_logprobs_over_http_with_two_ranks(checkpoints, expected):
    with serving(checkpoints[0], tp_size=2) as two:
        check_updates(two, checkpoints, expected, tp_size=2)


def abandon_request(server: Server) -> None:
    """Start a request and close the connection while it runs."""
    with contextlib.closing(server.connect()) as connection:
        body = {"input_ids": PROMPT, "sampling_params": SAMPLING | {"max_new_tokens": 60}, "stream": True}
        connection.request("POST", "/generate", json.dumps(body), HEADERS)
        assert connection.getresponse().readline().startswith(b"data:")


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_updates_with_concurrent_and_abandoned_requests(server, checkpoints, expected, in_flight):
    """SGLang crashes if it flushes its cache while a request runs; an abandoned request still runs for a while."""
    stop = threading.Event()

    def call_repeatedly(num_tokens: int) -> set[int]:
        body = {"input_ids": PROMPT, "sampling_params": SAMPLING | {"max_new_tokens": num_tokens}}
        statuses = set()
        while not stop.is_set():
            statuses.add(server.request("POST", "/generate", body)[0])
        return statuses

    updater = WeightUpdater([HttpEngine(server.url, api_key=API_KEY)], in_flight=in_flight)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(call_repeatedly, num_tokens) for num_tokens in (3, 7, 12)]
        try:
            for version in range(6):
                abandon_request(server)
                path = checkpoints[1 + version % 2]
                assert updater.update(state(path), version).quarantined == {}
                out = server.generate()
                assert (out["output_ids"], out["meta_info"]["weight_version"]) == (expected[path], str(version))
        finally:
            stop.set()
    assert all(200 in call.result() for call in calls)  # others were aborted
    updater.close()


def test_wrong_key_is_refused(server):
    with pytest.raises(RuntimeError, match=r"HTTP 401 .*check api_key"):
        HttpEngine(server.url, api_key="wrong").flush_cache()


def test_cache_that_cannot_be_flushed_is_an_error(server, checkpoints, expected):
    engine = StockHttpEngine(server.url, api_key=API_KEY, timeout_s=10)
    updater = WeightUpdater([engine])
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
    updater.readmit([engine], state(checkpoints[0]), "free")
    out = server.generate()
    assert (out["output_ids"], out["meta_info"]["weight_version"]) == (expected[checkpoints[0]], "free")
