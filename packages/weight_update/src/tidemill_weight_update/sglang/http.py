"""The client of an SGLang HTTP server."""

import base64
import http.client
import json
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import wait
from typing import Any

from tidemill_weight_update.client import PauseMode
from tidemill_weight_update.control.descriptor import Request
from tidemill_weight_update.lora import LoraConfig
from tidemill_weight_update.memory import BucketHandle
from tidemill_weight_update.sglang.payload import (
    DRAIN_S,
    FLUSH_WAIT_FRACTION,
    LOAD_FORMAT,
    LOADER,
    has_loader,
    request_payload,
    stock_payload,
)

_AT_ONCE_S = 0.25
"""Time within which a response arrives that does not wait for anything."""


class HttpEngine:
    """Client of an SGLang server on this machine, or with a link on another one. A server on this machine reads the
    sender's memory; only the layout is sent over HTTP.

    SGLang unpickles what arrives on its port: bind it to the loopback interface and set an API key.

    Args:
        url: URL of the server, such as "http://127.0.0.1:30000".
        api_key: bearer token: the server's `--admin-api-key` if it has one, else its `--api-key`.
        timeout_s: longest wait for one response of the server, including running requests.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 300.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL like http://127.0.0.1:30000, got {url!r}")
        self._url = parts
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._info: dict[str, Any] | None = None
        self._is_paused = False
        self._is_held = False
        self._flushing: http.client.HTTPConnection | None = None  # its response arrives after that of the load

    def __repr__(self) -> str:
        return f"HttpEngine({self._url.geturl()})"

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks, as the server reported it when `has_loader` was last read."""
        return int(self._server_info["tp_size"])

    @property
    def has_loader(self) -> bool:
        """Whether the server has the tidemill loader. Requested from the server each time: it may have been restarted
        with other arguments, and crashes on a payload that does not fit them. ValueError for a server with replicas or
        pipeline stages.
        """
        self._info = None
        return has_loader(self._server_info)

    @property
    def _server_info(self) -> dict[str, Any]:
        if self._info is None:
            self._info = self._get("/server_info", "tp_size")
        return self._info

    def load(self, request: Request, *, flush_cache: bool) -> None:
        """Pass `request` to all ranks, through POST /update_weights_from_tensor."""
        self._update(request_payload(request), LOADER)
        if flush_cache:
            self.flush_cache()

    def hold(self) -> None:
        """Make requests wait for `resume`, and start the flush that `flush_cache` then waits for.

        SGLang's lock holds back new requests while a load runs, but not during the flush after it. So a pause and a
        flush are queued in the scheduler behind the load, before the requests that waited for the lock. A request that
        still runs because its client disconnected has finished by then, or returns to the queue.
        """
        self._drop_flush()
        connection = self._connect()
        self._is_paused = True
        self._send(connection, "POST", "/pause_generation", {"mode": "retract"})
        if not wait([connection.sock], _AT_ONCE_S):
            self.get_weight_version()
            # The server responds to other requests, so it is paused: a second pause waits for the end of the load.
            if not wait([connection.sock], _AT_ONCE_S):
                connection.close()
                return
        self._answer(connection, "POST", "/pause_generation")
        self._is_held = True
        self._send(connection, "POST", "/flush_cache")  # on the open connection, so that it arrives at once
        self._flushing = connection

    def load_bucket(self, bucket: BucketHandle) -> None:
        """Load one bucket through POST /update_weights_from_tensor."""
        self._update(stock_payload(bucket), LOAD_FORMAT)

    def flush_cache(self) -> None:
        """Empty the prefix cache as soon as no request runs. New requests are held back only by `hold`.

        After `hold`, a request that blocks the flush (its client disconnected, and it could not finish at once) is
        aborted together with all requests that arrived since: SGLang can abort a request without a client only together
        with all others.

        Raises:
            RuntimeError: there were always running or waiting requests, the server is down, or it did not respond in
                time.
        """
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            with closing(flushing):
                status, _ = self._receive(flushing, "POST", "/flush_cache")
            if status == 200:
                return
            self._request("POST", "/abort_request", {"abort_all": True})
        max_wait_s = DRAIN_S if self._is_paused else self._timeout_s * FLUSH_WAIT_FRACTION
        self._request("POST", f"/flush_cache?timeout={max_wait_s:g}")

    def get_weight_version(self) -> str:
        return str(self._get("/model_info", "weight_version")["weight_version"])

    def pause(self, mode: PauseMode) -> None:
        """Stop generation; new requests wait for `resume`. The server may be paused already.

        If it is, and not by `hold`, requests that waited for the end of that pause may start, and are aborted with the
        others.
        """
        self._is_paused = True  # set before the call: the server may pause and not respond
        if mode == "abort" and self._is_held:  # nothing runs, so all requests end while the server stays paused
            self._request("POST", "/abort_request", {"abort_all": True})
            return
        if mode == "abort":  # SGLang waits until all requests have finished; those of a paused scheduler never do
            self._request("POST", "/continue_generation", {})
        self._request("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> None:
        self._drop_flush()
        self._request("POST", "/continue_generation", {})
        self._is_paused = self._is_held = False

    def set_weight_version(self, version: str) -> None:
        self._request("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def adapters(self) -> list[str]:
        """Return the adapters that GET /v1/models lists below the model itself."""
        models = self._get("/v1/models", "data")
        return [model["id"] for model in models["data"] if model.get("parent") is not None]

    def load_adapter(self, name: str, config: LoraConfig, bucket: BucketHandle) -> None:
        """Load an adapter through POST /load_lora_adapter_from_tensors."""
        body = {
            "lora_name": name,
            "config_dict": config.to_sglang(),
            "serialized_named_tensors": [base64.b64encode(stock_payload(bucket)).decode()] * self.tp_size,
            "load_format": LOAD_FORMAT,
        }
        self._request("POST", "/load_lora_adapter_from_tensors", body)

    def unload_adapter(self, name: str) -> None:
        """Wait until no request uses the adapter, and remove it; RuntimeError if there is none, or after a timeout."""
        self._request("POST", "/unload_lora_adapter", {"lora_name": name})

    def _update(self, payload: bytes, load_format: str) -> None:
        body = {
            "serialized_named_tensors": [base64.b64encode(payload).decode()] * self.tp_size,
            "load_format": load_format,
            "flush_cache": False,
            "disable_draft_model": True,
        }
        self._request("POST", "/update_weights_from_tensor", body)

    def _drop_flush(self) -> None:
        """Close the connection of a flush whose load failed; SGLang may still execute the flush."""
        if self._flushing is not None:
            self._flushing.close()
            self._flushing = None

    def _get(self, path: str, key: str) -> dict[str, Any]:
        """Return a JSON object that has `key`."""
        content = self._request("GET", path)
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or key not in answer:
            raise RuntimeError(f"GET {path}: expected JSON with {key!r}, got {content[:80]!r}; is it an SGLang server?")
        return answer

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        with closing(self._connect()) as connection:
            self._send(connection, method, path, body)
            return self._answer(connection, method, path)

    def _answer(self, connection: http.client.HTTPConnection, method: str, path: str) -> bytes:
        status, content = self._receive(connection, method, path)
        if status != 200:
            hint = "; check api_key" if status in (401, 403) else ""
            raise RuntimeError(f"{method} {path}: HTTP {status} {content.decode(errors='replace')[:500]}{hint}")
        return content

    def _connect(self) -> http.client.HTTPConnection:
        connect = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        assert self._url.hostname is not None
        return connect(self._url.hostname, self._url.port, timeout=self._timeout_s)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None
    ) -> None:
        data = None if body is None else json.dumps(body).encode()
        with self._named(method, path):
            connection.request(method, self._url.path.rstrip("/") + path, data, self._headers)

    def _receive(self, connection: http.client.HTTPConnection, method: str, path: str) -> tuple[int, bytes]:
        """Return status and content of the response."""
        with self._named(method, path):
            response = connection.getresponse()
            return response.status, response.read()

    @contextmanager
    def _named(self, method: str, path: str) -> Iterator[None]:
        """Convert connection errors to RuntimeErrors that contain the request."""
        try:
            yield
        except TimeoutError as error:
            raise RuntimeError(
                f"{method} {path}: no response within {self._timeout_s} s (timeout_s of HttpEngine)"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"{method} {path}: cannot reach the server ({error!r}); is it running?") from error
