"""SGLang's HTTP server."""

import base64
import http.client
import json
import urllib.parse
from typing import Any

from tidemill_weight_update.handle import BucketHandle
from tidemill_weight_update.sglang.payload import LOAD_FORMAT, stock_payload


class HttpEngine:
    """The client of an SGLang server on this machine (it reads the sender's memory, only the layout goes over HTTP).

    SGLang unpickles what arrives on its port: bind it to the loopback interface and set an API key.

    Args:
        url: of the server, as "http://127.0.0.1:30000".
        api_key: sent as a bearer token: the server's `--admin-api-key` if it has one, else its `--api-key`.
        timeout_s: longest wait for one answer of the server, running requests included.
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
        self._tp_size: int | None = None

    def __repr__(self) -> str:
        return f"HttpEngine({self._url.geturl()})"

    @property
    def tp_size(self) -> int:
        """As the server reports it, asked once."""
        if self._tp_size is None:
            self._tp_size = int(json.loads(self._request("GET", "/server_info"))["tp_size"])
        return self._tp_size

    def load_bucket(self, bucket: BucketHandle) -> None:
        """Loads one bucket through POST /update_weights_from_tensor.

        Raises:
            RuntimeError: the server is down, refused, did not answer in time, or the bucket's memory cannot be opened.
        """
        payload = base64.b64encode(stock_payload(bucket)).decode()
        body = {
            "serialized_named_tensors": [payload] * self.tp_size,
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
            "weight_version": bucket.weight_version,
        }
        self._request("POST", "/update_weights_from_tensor", body)

    def flush_cache(self) -> None:
        """Empties the prefix cache.

        Raises:
            RuntimeError: the server has running or waiting requests, is down, or did not answer in time.
        """
        self._request("POST", "/flush_cache")

    def get_weight_version(self) -> str:
        return str(json.loads(self._request("GET", "/model_info"))["weight_version"])

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        connect = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        assert self._url.hostname is not None
        connection = connect(self._url.hostname, self._url.port, timeout=self._timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._url.path.rstrip("/") + path, data, self._headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError as error:
            raise RuntimeError(f"{method} {path}: no answer within {self._timeout_s} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"{method} {path}: cannot reach the server ({error!r}); is it running?") from error
        finally:
            connection.close()
        if response.status != 200:
            hint = "; check api_key" if response.status in (401, 403) else ""
            raise RuntimeError(
                f"{method} {path}: HTTP {response.status} {content.decode(errors='replace')[:500]}{hint}"
            )
        return content
