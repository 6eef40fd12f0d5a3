"""SGLang clients without SGLang: with a small HTTP server and a small engine object defined here."""

import asyncio
import base64
import contextlib
import json
import pickle
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from tidemill_weight_update import BucketHandle, WeightUpdater
from tidemill_weight_update.memory import CudaMemory, HostArena
from tidemill_weight_update.send.stock import plan_buckets
from tidemill_weight_update.sglang import HttpEngine, LocalEngine
from tidemill_weight_update.sglang.payload import LOADER, stock_payload


class FakeServer(ThreadingHTTPServer):
    """Server with the part of SGLang's HTTP protocol that the client uses."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.requests: list[tuple[str, str, dict]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.version = "default"
        self.loaders: list[str] = []
        self.arguments: dict[str, object] = {}
        self.failing: dict[str, tuple[int, str]] = {}
        self.delay_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format, *args):
        pass

    def handle(self):
        with contextlib.suppress(BrokenPipeError):  # a client that timed out
            super().handle()

    def do_GET(self):
        self._answer({})

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        self._answer(json.loads(self.rfile.read(length) or b"{}"))

    def _answer(self, body: dict):
        self.server.requests.append((self.command, self.path, body))
        time.sleep(self.server.delay_s)
        status, content = self.server.failing.get(self.path.partition("?")[0], (200, ""))
        if self.headers.get("Authorization") != "Bearer secret":
            status, content = 401, "Unauthorized"
        if status == 200 and not content:
            if self.path == "/server_info":
                content = json.dumps(
                    {"tp_size": 2, "custom_weight_loader": self.server.loaders} | self.server.arguments
                )
            elif self.path == "/model_info":
                content = json.dumps({"weight_version": self.server.version})
            elif self.path == "/update_weights_from_tensor":
                self._load(body)
                content = json.dumps({"success": True})
            elif self.path == "/update_weight_version":
                self.server.version = body["new_version"]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content.encode())

    def _load(self, body: dict):
        payload = pickle.loads(base64.b64decode(body["serialized_named_tensors"][1]))
        for meta in payload["metadata"]:
            flat = payload["flattened_tensor"][meta.start_idx : meta.end_idx]
            self.server.weights[meta.name] = flat.view(meta.dtype).reshape(meta.shape).clone()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


ITEMS = [(f"t{i}", torch.full((16,), float(i))) for i in range(3)]


def test_http_engine_sends_one_payload_per_rank_and_flushes_once(server):
    engine = HttpEngine(server.url + "/", api_key="secret")
    WeightUpdater([engine], bucket_bytes=128).update(ITEMS, 5)
    assert engine.tp_size == 2
    paths = [f"{method} {path}" for method, path, _ in server.requests]
    load = "POST /update_weights_from_tensor"
    version = ["POST /update_weight_version", "GET /model_info"]
    assert paths == ["GET /server_info", load, load, "POST /flush_cache?timeout=270", *version]
    first, last = (body for _, path, body in server.requests if path == "/update_weights_from_tensor")
    assert server.version == "5"
    for body in (first, last):
        assert (body["load_format"], body["flush_cache"]) == ("flattened_bucket", False)
        assert len(body["serialized_named_tensors"]) == 2  # one payload per tensor-parallel rank
    assert {name: tensor.tolist() for name, tensor in server.weights.items()} == {n: t.tolist() for n, t in ITEMS}


def test_server_errors_are_reported(server):
    updater = WeightUpdater([HttpEngine(server.url, api_key="secret")])
    server.failing["/update_weights_from_tensor"] = (400, '{"success":false,"message":"no such layer"}')
    with pytest.raises(RuntimeError, match=r"engine 0 of 1 \(HttpEngine\(http://.*HTTP 400 .*no such layer"):
        updater.update(ITEMS, 1)
    server.failing = {"/flush_cache": (400, "Flush cache failed.")}
    updater = WeightUpdater([HttpEngine(server.url, api_key="secret")])
    with pytest.raises(
        RuntimeError, match=r"did not flush its prefix cache: POST /flush_cache\?timeout=270: HTTP 400 Flush"
    ):
        updater.update(ITEMS, 1)


def test_wrong_api_key_is_reported_without_the_key(server):
    engine = HttpEngine(server.url, api_key="wrong")
    with pytest.raises(RuntimeError, match=r"HTTP 401 Unauthorized; check api_key") as caught:
        WeightUpdater([engine]).update(ITEMS, 1)
    assert "wrong" not in str(caught.value) + repr(engine)


def test_unreachable_or_slow_server_is_an_error(server):
    server.delay_s = 0.5
    with pytest.raises(RuntimeError, match=r"GET /server_info: no response within 0.1 s"):
        WeightUpdater([HttpEngine(server.url, api_key="secret", timeout_s=0.1)]).update(ITEMS, 1)
    with pytest.raises(RuntimeError, match=r"cannot reach the server \(ConnectionRefusedError.*is it running\?"):
        WeightUpdater([HttpEngine("http://127.0.0.1:9")]).update(ITEMS, 1)


@pytest.mark.parametrize("content", ["<html>welcome</html>", "{}", "[1]"])
def test_server_that_is_not_sglang_is_named(server, content):
    server.failing["/server_info"] = (200, content)
    message = r"engine 0 of 1 \(HttpEngine.*GET /server_info: expected JSON with 'tp_size', got b'.*is it an SGLang"
    with pytest.raises(RuntimeError, match=message):
        WeightUpdater([HttpEngine(server.url, api_key="secret")]).update(ITEMS, 1)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://"])
def test_invalid_url_is_refused(url):
    with pytest.raises(ValueError, match="expected a URL like"):
        HttpEngine(url)


class FakeManager:
    """`tokenizer_manager` of the engine object."""

    def __init__(self) -> None:
        self.answer = (True, "")
        self.delay_s = 0.0
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = SimpleNamespace(writer_lock=asyncio.Lock())
        self.max_wait_s: float | None = None

    async def update_weights_from_tensor(self, request, http_request):
        await asyncio.sleep(self.delay_s)
        return self.answer

    async def flush_cache(self, timeout_s=None):
        self.max_wait_s = timeout_s
        await asyncio.sleep(self.delay_s)
        return SimpleNamespace(success=self.answer[0], message=self.answer[1])


@pytest.fixture
def local() -> Iterator[SimpleNamespace]:
    loop = asyncio.new_event_loop()
    args = SimpleNamespace(model_path="tiny", tp_size=2)
    yield SimpleNamespace(tokenizer_manager=FakeManager(), server_args=args, loop=loop)
    loop.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp_size": 2}, r"dp_size=2 are not supported; launch that many engines instead"),
        ({"pp_size": 2}, r"pp_size=2 are not supported; launch it with pp_size=1"),
        ({"dp_size": 2, "enable_dp_attention": True}, None),
    ],
)
def test_data_and_pipeline_parallel_engines_are_refused(local, server, arguments, message):
    vars(local.server_args).update(arguments, custom_weight_loader=[LOADER])
    server.arguments = {**arguments, "custom_weight_loader": [LOADER]}
    for engine in (LocalEngine(local), HttpEngine(server.url, api_key="secret")):
        if message is None:
            assert engine.has_loader
            continue
        with pytest.raises(ValueError, match=message):
            _ = engine.has_loader
        with pytest.raises(RuntimeError, match=message):
            WeightUpdater([engine]).update(ITEMS, 1)


def test_local_engine_of_a_string_is_refused():
    with pytest.raises(TypeError, match=r"engine must be an sglang\.Engine, got 'http://host:1'; .* HttpEngine\(url\)"):
        LocalEngine("http://host:1")


def test_local_engine_reports_why_it_cannot_flush(local):
    engine = LocalEngine(local, timeout_s=0.1)
    assert (repr(engine), engine.tp_size) == ("LocalEngine(tiny, tp_size=2)", 2)
    engine.flush_cache()
    local.tokenizer_manager.answer = (False, "")
    with pytest.raises(RuntimeError, match=r"cannot flush its prefix cache: requests still run after 0\.09 s"):
        engine.flush_cache()
    assert local.tokenizer_manager.max_wait_s == pytest.approx(0.09)

    local.tokenizer_manager.delay_s = 1.0
    with pytest.raises(RuntimeError, match=r"no response within 0.1 s"):
        engine.flush_cache()

    async def inside():
        with pytest.raises(RuntimeError, match="event loop is running"):
            engine.flush_cache()

    local.loop.run_until_complete(inside())
    local.tokenizer_manager = None
    with pytest.raises(RuntimeError, match="use the engine object of node rank 0"):
        engine.flush_cache()


def handle(arena: HostArena) -> BucketHandle:
    (bucket,) = plan_buckets(ITEMS, 1 << 20)
    for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
        entry.view(arena.data).copy_(tensor)
    return BucketHandle(index=0, entries=bucket.entries, memory=arena.publish())


def test_payload_maps_the_memory_of_the_trainer_without_a_copy():
    arena = HostArena(1000)
    payload = pickle.loads(stock_payload(handle(arena)))
    arena.data[3] = 77
    assert payload["flattened_tensor"][3] == 77
    meta = payload["metadata"][1]
    assert (meta.name, meta.shape, meta.dtype) == ("t1", torch.Size([16]), torch.float32)
    assert (meta.start_idx, meta.end_idx, meta.numel) == (64, 128, 64)
    del payload
    arena.close()


def test_gpu_payload_synchronizes_before_it_maps_memory(monkeypatch):
    called = []
    monkeypatch.setattr(torch.cuda, "synchronize", fence := lambda: called.append("fence"))
    monkeypatch.setattr(torch.multiprocessing.reductions, "rebuild_cuda_tensor", rebuild := lambda *a: called.append(a))
    fence.__module__ = "torch.cuda"
    fence.__qualname__ = "synchronize"
    rebuild.__module__ = "torch.multiprocessing.reductions"
    rebuild.__qualname__ = "rebuild_cuda_tensor"
    memory = CudaMemory(rebuild_args=(1, "u"))
    bucket = BucketHandle(index=0, entries=handle(HostArena(1000)).entries, memory=memory)
    pickle.loads(stock_payload(bucket))
    assert called == ["fence", (1, "u")]
