"""SGLang's HTTP server as a subprocess."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidemill_testing.sglang_server import HEADERS as AUTHORIZATION
from tidemill_testing.sglang_server import sglang_server
from tidemill_weight_update.sglang import sglang_launch_args

HEADERS = AUTHORIZATION | {"Content-Type": "application/json"}
PROMPT = [5, 6, 7, 8, 9]
SAMPLING = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}


class Server:
    """A stock SGLang server on the loopback interface.

    Attributes:
        url: URL of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Send a request; return the status and the body, parsed if it is JSON."""
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
            response = connection.getresponse()
            content = response.read()
        return response.status, json.loads(content) if content[:1] in (b"{", b"[") else content

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=120)

    def generate(self, **fields: Any) -> dict[str, Any]:
        status, out = self.request("POST", "/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING} | fields)
        assert status == 200, out
        return out


@contextmanager
def serving(checkpoint: Path, *, python_path: Path | None = None, **arguments: Any) -> Iterator[Server]:
    """Start a server of `checkpoint` with the fast loader.

    Args:
        python_path: folder that is searched for modules first.
        arguments: SGLang arguments, in addition to those of `tidemill_testing.sglang_server`.
    """
    environment = {} if python_path is None else {"PYTHONPATH": str(python_path)}
    settings = {"enable_deterministic_inference": False} | sglang_launch_args() | arguments
    with sglang_server(checkpoint, environment=environment, **settings) as (url, _):
        yield Server(url)
