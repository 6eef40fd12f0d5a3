"""Scores of a reward model that an SGLang server computes."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import httpx

from tidemill_rollout.episode import EpisodeFn
from tidemill_rollout.episodes.single_turn import generate_reply
from tidemill_rollout.outcome import to_outcome
from tidemill_rollout.problem import Problem
from tidemill_rollout.session import Session

_SHOWN_CHARS = 300


class RewardEndpointError(RuntimeError):
    """A reward endpoint failed, exceeded its time limit, or returned no score; the message has its address."""


class RewardEndpoint:
    """A model for sequence classification with one label, on an SGLang server that was started with `--is-embedding`.

    Scores are requested from the server's native `/classify`, by token ids: the model must have the tokenizer of the
    policy, and the server adds no special tokens. Requests run at the same time, each on a connection of its own.

    Args:
        url: address of the server, such as "http://127.0.0.1:30000".
        timeout_s: time limit of a request; inf disables it.

    Raises:
        ValueError: `url` is no address of an HTTP server.
    """

    def __init__(self, url: str, *, timeout_s: float = math.inf) -> None:
        self.url = f"{url.rstrip('/')}/classify"
        self._timeout_s = timeout_s
        try:
            is_http = httpx.URL(url).scheme in ("http", "https") and httpx.URL(url).host != ""
        except httpx.InvalidURL as error:
            raise ValueError(f"expected an address such as http://127.0.0.1:30000, got {url!r}: {error}") from error
        if not is_http:
            raise ValueError(f"expected an address such as http://127.0.0.1:30000, got {url!r}")
        # No idle connections: the server would close one at the moment when a request is sent on it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=None, limits=limits)

    async def score(self, token_ids: Sequence[int]) -> float:
        """Return the score of a token sequence, prompt and response.

        Raises:
            RewardEndpointError: the server failed, exceeded the time limit, or did not return one finite number.
        """
        try:
            async with asyncio.timeout(None if math.isinf(self._timeout_s) else self._timeout_s):
                response = await self._client.post(self.url, json={"input_ids": list(token_ids)})
        except TimeoutError as error:
            raise RewardEndpointError(f"{self.url} returned no score within {self._timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise RewardEndpointError(f"the request to {self.url} failed: {type(error).__name__}: {error}") from error
        body = response.text[:_SHOWN_CHARS]
        if response.status_code != 200:
            raise RewardEndpointError(f"expected status 200 from {self.url}, got {response.status_code}: {body}")
        try:
            return to_outcome(_score(response.json())).reward
        except (TypeError, ValueError) as error:
            raise RewardEndpointError(
                f'expected {{"embedding": [score]}} from {self.url}, as SGLang\'s /classify returns for a model with '
                f"one label, got {body}: {error}"
            ) from error


def endpoint_turn(endpoint: RewardEndpoint) -> EpisodeFn:
    """Return the episode that generates one reply to the prompt, whose reward is the score of prompt and reply."""

    async def episode(problem: Problem, session: Session) -> float:
        await generate_reply(problem, session)
        return await endpoint.score(session.trajectories()[-1].token_ids)

    return episode


def _score(result: Any) -> Any:
    match result:
        case {"embedding": [score]}:
            return score
        case {"embedding": [*scores]}:
            raise ValueError(f"{len(scores)} numbers")
    raise ValueError("no list of numbers in `embedding`")
