"""SGLang as an engine: a server, over its native HTTP interface, or an engine of this process."""

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Self

import httpx

from tidemill_rollout.engine import Generation, SamplingParams
from tidemill_rollout.errors import EngineDiedError, EngineError

logger = logging.getLogger(__name__)


class SGLangServer:
    """A server that was started with `python -m sglang.launch_server`. Use it with `async with`, or call `close`.

    Args:
        url: address of the server, such as "http://127.0.0.1:30000".
        api_key: the server's `--api-key`.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No idle connections: the server would close one at the moment when a request is sent on it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=None, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. The server aborts their requests within seconds."""
        await self._client.aclose()

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        """Sample one continuation; see `Engine.generate`."""
        request_id = uuid.uuid4().hex
        body = {
            "rid": request_id,
            "input_ids": list(token_ids),
            "sampling_params": sglang_sampling(sampling),
            "return_logprob": True,
        }
        try:
            response = await self._client.post("/generate", json=body)
        except asyncio.CancelledError:
            await self._abort(request_id)
            raise
        except httpx.HTTPError as error:
            raise EngineDiedError(f"the SGLang server {self.url} failed: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise EngineError(f"the SGLang server {self.url} returned {response.status_code}: {response.text[:1000]}")
        return to_generation(response.json())

    async def _abort(self, request_id: str) -> None:
        """Free a request at once; SGLang itself looks for closed connections only every few seconds."""
        try:
            response = await self._client.post("/abort_request", json={"rid": request_id}, timeout=5)
            response.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("the SGLang server %s did not abort a cancelled request: %r", self.url, error)


class SGLangEngine:
    """An `sglang.Engine` that this process has started. Use it from one event loop, as SGLang requires.

    Args:
        engine: the engine. SGLang aborts a request in it when its call is cancelled.
        arguments: further arguments of each `Engine.async_generate`, such as `{"return_routed_experts": True}`.
    """

    def __init__(self, engine: Any, *, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._engine = engine
        self._arguments = dict(arguments)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        """Sample one continuation; see `Engine.generate`."""
        if sampling.stop and self._engine.server_args.skip_tokenizer_init:
            raise EngineError(
                f"stop={list(sampling.stop)} requires the tokenizer in the engine, which was started without it; start "
                "it with skip_tokenizer_init=False (in tidemill-trainer: rollout.engine_args)"
            )
        try:
            output = await self._engine.async_generate(
                input_ids=list(token_ids),
                sampling_params=sglang_sampling(sampling),
                return_logprob=True,
                **self._arguments,
            )
        except Exception as error:  # SGLang raises ValueError, HTTPException and errors of its own
            raise EngineError(f"SGLang refused or aborted the request: {type(error).__name__}: {error}") from error
        return to_generation(output)


def sglang_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return SGLang's `sampling_params`."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **sampling.extra,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params


def to_generation(output: Mapping[str, Any]) -> Generation:
    """Return the generation for one output of SGLang with `return_logprob`.

    Raises:
        EngineError: SGLang aborted the request, or returned no log-probs.
    """
    meta = output["meta_info"]
    finish = meta["finish_reason"]
    if finish is None or finish["type"] not in ("stop", "length"):
        raise EngineError(f'expected SGLang\'s finish_reason "stop" or "length", got {finish}')
    if "output_token_logprobs" not in meta:
        raise EngineError("SGLang returned no log-probs; its request needs return_logprob=True")
    sampled = meta["output_token_logprobs"]
    return Generation(
        token_ids=[item[1] for item in sampled],
        log_probs=[item[0] for item in sampled],
        finish_reason=finish["type"],
        versions=[(str(meta.get("weight_version", "")), len(sampled))] if sampled else [],
        extra={name: meta[name] for name in ("routed_experts",) if meta.get(name) is not None},
    )
