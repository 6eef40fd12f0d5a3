"""SGLang as an engine: a server, over its native HTTP interface, or an engine of this process."""

import asyncio
import base64
import logging
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType, TracebackType
from typing import Any, Self

import httpx

from tidemill_rollout.engine import Generation, SamplingParams
from tidemill_rollout.errors import EngineDiedError, EngineError

logger = logging.getLogger(__name__)

_ABORT_INTERVAL_S = 0.01


class SGLangServer:
    """A server that was started with `python -m sglang.launch_server`. Use it with `async with`, or call `close`.

    Its weights must not change while requests run: all tokens of a reply get the version that SGLang reports at its
    end. `SGLangEngine.interrupt` is for weight updates during requests.

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

    For a weight update, call `interrupt` before and `proceed` after it. Interrupted requests then continue from their
    tokens under the new weights, and `Generation.versions` has the number of tokens of each version.

    Args:
        engine: the engine. SGLang aborts a request in it when its call is cancelled.
        arguments: further arguments of each `GenerateReqInput`, such as `{"return_routed_experts": True}`.
        recompute_kv_cache: compute the keys and values of interrupted requests again. False: they continue with those
            that SGLang's prefix cache still has, which the weight update must not flush. Requests whose first token
            comes after `proceed` never find these: they have another `extra_key`.

    Raises:
        TypeError: `engine` is a string.
    """

    def __init__(
        self, engine: Any, *, arguments: Mapping[str, Any] = MappingProxyType({}), recompute_kv_cache: bool = True
    ) -> None:
        if isinstance(engine, str):
            raise TypeError(
                f"engine must be an sglang.Engine, got {engine!r}; start one with sglang.Engine(model_path=...), or "
                "use SGLangServer(url) for a server"
            )
        self._engine = engine
        self._arguments = dict(arguments)
        self._recomputes = recompute_kv_cache
        self._num_updates = 0
        self._num_running = 0
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def interrupt(self) -> None:
        """End all requests in the engine, between two tokens. They and new ones wait until `proceed`."""
        self._may_run.clear()
        while self._num_running > 0:  # again for requests that had not reached SGLang's scheduler
            self._engine.tokenizer_manager.abort_request(abort_all=True)
            await asyncio.sleep(_ABORT_INTERVAL_S)

    def proceed(self) -> None:
        """Continue the interrupted requests, and let new ones start."""
        self._num_updates += 1
        self._may_run.set()

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        """Sample one continuation; see `Engine.generate`."""
        if sampling.stop and self._engine.server_args.skip_tokenizer_init:
            raise EngineError(
                f"stop={list(sampling.stop)} requires the tokenizer in the engine, which was started without it; start "
                "it with skip_tokenizer_init=False (in tidemill-trainer: rollout.engine_args)"
            )
        parts: list[Generation] = []
        prompt, limit = list(token_ids), sampling.max_tokens
        key: str | None = None
        while limit is None or limit > 0:
            await self._may_run.wait()
            if not self._recomputes and not any(part.token_ids for part in parts):
                key = str(self._num_updates)  # nothing to continue: as a new request
            output = await self._run(prompt, replace(sampling, max_tokens=limit), key)
            is_interrupted = not self._may_run.is_set()
            parts.append(to_generation(output, is_interrupted=is_interrupted))
            if output["meta_info"]["finish_reason"]["type"] != "abort":
                break
            prompt += parts[-1].token_ids
            limit = None if limit is None else limit - len(parts[-1].token_ids)
        joined = _joined(parts)
        if len(parts) == 1 or not sampling.stop:
            return joined
        decode = self._engine.tokenizer_manager.tokenizer.decode
        end = end_at_stop([part.token_ids for part in parts], sampling.stop, decode)
        return joined if end is None else _first(joined, end, num_before=len(token_ids))

    async def _run(self, token_ids: list[int], sampling: SamplingParams, key: str | None) -> Mapping[str, Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        self._num_running += 1
        try:
            request = GenerateReqInput(
                input_ids=token_ids,
                sampling_params=sglang_sampling(sampling),
                return_logprob=True,
                extra_key=key,
                **self._arguments,
            )
            return await anext(self._engine.tokenizer_manager.generate_request(request, None))
        except Exception as error:  # SGLang raises ValueError, HTTPException and errors of its own
            raise EngineError(f"SGLang refused or aborted the request: {type(error).__name__}: {error}") from error
        finally:
            self._num_running -= 1


def sglang_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return SGLang's `sampling_params`.

    A request without a seed gets a random one: for deterministic inference, SGLang would use 42 for all of them.
    """
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "sampling_seed": secrets.randbits(31) if sampling.seed is None else sampling.seed,
        **sampling.extra,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    return params


def to_generation(output: Mapping[str, Any], *, is_interrupted: bool = False) -> Generation:
    """Return the generation for one output of SGLang with `return_logprob`.

    Args:
        is_interrupted: an aborted request is complete, with the finish reason "length".

    Raises:
        EngineError: SGLang aborted the request, or returned no log-probs.
    """
    meta = output["meta_info"]
    finish = meta["finish_reason"]
    reason = None if finish is None else finish["type"]
    if reason == "abort" and is_interrupted:
        reason = "length"
    if reason not in ("stop", "length"):
        raise EngineError(f'expected SGLang\'s finish_reason "stop" or "length", got {finish}')
    if "output_token_logprobs" not in meta:
        raise EngineError("SGLang returned no log-probs; its request needs return_logprob=True")
    sampled = meta["output_token_logprobs"]
    return Generation(
        token_ids=[item[1] for item in sampled],
        log_probs=[item[0] for item in sampled],
        finish_reason=reason,
        versions=[(str(meta.get("weight_version", "")), len(sampled))] if sampled else [],
        extra={name: meta[name] for name in ("routed_experts",) if meta.get(name) is not None},
    )


def end_at_stop(
    parts: Sequence[Sequence[int]], stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Return after how many tokens a stop string is complete that begins in one part of a request and ends in another.

    SGLang looks for stop strings in each part alone.

    Args:
        parts: the tokens of each part.
        stop: the stop strings.
        decode: returns the text of tokens.
    """
    ids = [token for part in parts for token in part]
    longest = 4 * max(map(len, stop))  # in tokens: a character may have four
    for start in accumulate(len(part) for part in parts[:-1]):
        for end in range(start + 1, min(start + longest, len(ids)) + 1):
            text = decode(ids[max(0, start - longest) : end])
            if any(each in text for each in stop):
                return end
    return None


def _first(generation: Generation, count: int, *, num_before: int) -> Generation:
    """Return the first tokens of a generation that a stop string ended, after a prompt of `num_before` tokens."""
    versions, left = [], count
    for version, length in generation.versions:
        versions += [(version, min(length, left))] if left else []
        left -= min(length, left)
    extra = dict(generation.extra)
    if "routed_experts" in extra:  # base64 of equally many bytes for each token but the last
        data = base64.b64decode(extra["routed_experts"])
        each = len(data) // (num_before + len(generation.token_ids) - 1)
        extra["routed_experts"] = base64.b64encode(data[: each * (num_before + count - 1)]).decode()
    return Generation(
        token_ids=generation.token_ids[:count],
        log_probs=generation.log_probs[:count],
        finish_reason="stop",
        versions=versions,
        extra=extra,
    )


def _joined(parts: Sequence[Generation]) -> Generation:
    """Join the parts of an interrupted request; the last one has the finish reason and the data of all tokens."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[-1],
        token_ids=[token for part in parts for token in part.token_ids],
        log_probs=[value for part in parts for value in part.log_probs],
        versions=[run for part in parts for run in part.versions],
    )
