"""An OpenAI-style HTTP endpoint for sessions, in the event loop of the policy."""

import asyncio
import contextlib
import json
import secrets
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill_rollout.chat_completions import (
    ChatRequest,
    completion,
    error_body,
    opening_chunks,
    parse_chat_request,
    reply_chunks,
)
from tidemill_rollout.errors import EngineError, LimitError, SessionEndedError
from tidemill_rollout.session import Reply, Session

_HANDLED: tuple[type[Exception], ...] = (
    HTTPException,
    ClientDisconnect,
    ValueError,
    LimitError,
    SessionEndedError,
    EngineError,
    Exception,
)


class Endpoint:
    """Serve `/v1/chat/completions` and `/v1/models` for the sessions of any number of policies.

    Use it with `async with`, and add each session that clients use. Its key selects the session. Requests run in the
    event loop that entered the endpoint, which must also be that of the sessions. A client that blocks this loop, such
    as a synchronous one in an `async` episode, never receives a reply.

    Tokens are not streamed one by one: a stream starts at once, and its content follows when the reply is complete.

    Args:
        host: address to listen on; other machines reach only an address of a network interface. "0.0.0.0" listens on
            all of them, and `base_url` has the one that leads to other machines.
        port: port; 0 chooses a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._port = port
        self._sessions: dict[str, Session] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """Address for clients, such as "http://127.0.0.1:8000/v1"."""
        return f"http://{_client_host(self._host)}:{self._port}/v1"

    async def __aenter__(self) -> Self:
        listener = socket.create_server((self._host, self._port))
        # Connections inherit it. asyncio does not set it for such a socket, and each reply would be delayed by 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port = listener.getsockname()[1]
        routes = [
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
        ]
        app = Starlette(routes=routes, exception_handlers=dict.fromkeys(_HANDLED, _on_error))
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=3600,  # clients close idle connections first, so that none meets a closed one
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server is not None
        assert self._serving is not None
        self._sessions.clear()
        self._server.should_exit = True
        self._server = None
        await self._serving

    def add(self, session: Session) -> None:
        """Give a session its `base_url` and `api_key`. Each of its branches has a key of its own.

        Raises:
            RuntimeError: the endpoint does not run.
            ValueError: the session has been added already.
        """
        if self._server is None:
            raise RuntimeError("the endpoint does not run; enter it with `async with` before sessions are added")
        key = secrets.token_urlsafe()
        session.connect(self.base_url, key)
        self._sessions[key] = session

    def remove(self, session: Session) -> None:
        """Refuse further requests of a session."""
        self._sessions.pop(session.api_key.partition(":")[0], None)

    def _session_of(self, request: Request) -> Session:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise HTTPException(401, "no API key: expected the header 'Authorization: Bearer KEY' with session.api_key")
        key, _, branch = token.strip().partition(":")
        session = self._sessions.get(key)
        if session is None:
            raise HTTPException(
                401, "no running session has this API key: the key is wrong, or the session's episode has ended"
            )
        return session.open_branch(unquote(branch)) if branch else session

    async def _models(self, request: Request) -> Response:
        self._session_of(request)
        return JSONResponse({"object": "list", "data": [_model_body("policy")]})

    async def _model(self, request: Request) -> Response:
        self._session_of(request)
        return JSONResponse(_model_body(request.path_params["name"]))

    async def _chat_completions(self, request: Request) -> Response:
        session = self._session_of(request)
        asked = parse_chat_request(await _json(request))
        names = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())}
        tasks = [
            asyncio.create_task(session.generate(asked.messages, tools=asked.tools, **asked.sampling_of(number)))
            for number in range(asked.num_replies)
        ]
        if asked.is_stream:
            await asyncio.sleep(0)  # the tasks run up to the engine, so that a refused request gets an error status
            if not any(task.done() and task.exception() for task in tasks):
                return _EventStream(_events(asked, session, tasks, request, names), tasks)
        try:
            replies = await _replies(tasks, request)
        except LimitError as error:
            session.note_refusal(error)
            raise
        return JSONResponse(completion(asked, replies, session.template.tokenizer, **names))


class _Server(uvicorn.Server):
    """A server that leaves signals to the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _EventStream(StreamingResponse):
    """Server-sent events. However they end, no request remains in the engine."""

    def __init__(self, events: AsyncIterator[str], tasks: Sequence[asyncio.Task[Reply]]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._tasks = tasks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _cancel(self._tasks)


async def _events(
    asked: ChatRequest,
    session: Session,
    tasks: Sequence[asyncio.Task[Reply]],
    request: Request,
    names: dict[str, Any],
) -> AsyncIterator[str]:
    for chunk in opening_chunks(asked, **names):
        yield _event(chunk)
    try:
        replies = await _replies(tasks, request)
    except Exception as error:  # noqa: BLE001 - sent to the client, which raises it
        yield _event(_error(error)[1])
        return
    for chunk in reply_chunks(asked, replies, session.template.tokenizer, **names):
        yield _event(chunk)
    yield "data: [DONE]\n\n"


async def _replies(tasks: Sequence[asyncio.Task[Reply]], request: Request) -> list[Reply]:
    """Wait for all replies. If the client disconnects or one of them fails, cancel the others.

    Raises:
        ClientDisconnect: the client has closed the connection.
        Exception: the error of a reply.
    """
    disconnect = asyncio.create_task(_wait_for_disconnect(request))
    running = set(tasks)
    try:
        while running:
            done, _ = await asyncio.wait({*running, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if disconnect in done:
                raise ClientDisconnect
            for task in done:
                task.result()  # raises its error
            running.difference_update(done)
        return [task.result() for task in tasks]
    finally:
        disconnect.cancel()
        await _cancel(tasks)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Sequence[asyncio.Task[Reply]]) -> None:
    """Cancel tasks, and with them their requests to the engine."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _client_host(host: str) -> str:
    """Return the address at which clients reach a server that listens on `host`."""
    if host != "0.0.0.0":
        return host
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # selects a network interface and sends nothing
        except OSError:  # no network
            return "127.0.0.1"
        return probe.getsockname()[0]


async def _json(request: Request) -> Any:
    body = await request.body()
    try:
        return json.loads(body)
    except ValueError as error:
        raise ValueError(f"the body must be JSON: {error}") from error


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _model_body(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tidemill"}


async def _on_error(request: Request, error: Exception) -> Response:
    status, body = _error(error)
    if status in (404, 405):
        body = error_body(
            f"{request.method} {request.url.path} is not supported, only POST /v1/chat/completions and GET /v1/models; "
            "set the client to the chat completions API",
            "not_found",
        )
    # Clients of OpenAI repeat a request after a server error unless they receive this header.
    return JSONResponse(body, status, {"x-should-retry": "false"})


def _error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body for an error. After the status of a limit, no client repeats a request."""
    match error:
        case HTTPException():
            return error.status_code, error_body(error.detail, "invalid_api_key")
        case ClientDisconnect():
            return 499, error_body("the client has closed the connection", "client_disconnected")
        case SessionEndedError():
            return 401, error_body(str(error), "session_ended")
        case LimitError():
            code = "context_length_exceeded" if error.limit == "length" else "max_turns_exceeded"
            return 400, error_body(str(error), code)
        case ValueError():
            return 400, error_body(str(error), "invalid_request")
        case EngineError():
            return 502, error_body(str(error), "engine_error", "server_error")
        case _:
            return 500, error_body(f"{type(error).__name__}: {error}", "internal_error", "server_error")
