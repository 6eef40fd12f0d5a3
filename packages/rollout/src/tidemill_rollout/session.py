"""A session: an episode's access to the policy."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any
from urllib.parse import quote

import numpy as np

from tidemill_rollout.engine import Engine, Generation, SamplingParams
from tidemill_rollout.errors import EngineError, LimitError, SessionEndedError
from tidemill_rollout.messages import Message, check_messages
from tidemill_rollout.parser import ReplyParser
from tidemill_rollout.recorder import Prompt, Recorder
from tidemill_rollout.template import ChatTemplate
from tidemill_rollout.trajectory import Trajectory

CANCEL_GRACE_S = 5.0
"""How long a cancelled episode or request may take for its clean-up."""
_SAMPLING_FIELDS = {item.name for item in fields(SamplingParams)} - {"extra"}
_FREE_IN_TRAINING = {"max_tokens", "stop", "seed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionConfig:
    """Settings of a session.

    Attributes:
        sampling: sampling parameters without a seed; `max_tokens` is the default and the maximum of one reply.
        context_length: maximum number of tokens of one token sequence, prompt included.
        max_turns: maximum number of replies.
        generate_timeout_s: timeout of one request to the engine.
        is_training: refuse sampling parameters that differ from `sampling` in what changes the distribution, because
            the trainer computes log-probs for `sampling`.

    Raises:
        ValueError: `sampling` has a seed.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    context_length: int = 32768
    max_turns: int = 1000
    generate_timeout_s: float = 600.0
    is_training: bool = True

    def __post_init__(self) -> None:
        if (seed := self.sampling.seed) is not None:
            raise ValueError(f"seed={seed} would be that of all requests of all sessions; pass the seed to session()")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One reply of the model.

    Attributes:
        message: the assistant message, to be appended to the conversation: `content` without a stop string, and where
            the model wrote them `reasoning_content` and `tool_calls`.
        text: the whole reply without special tokens, including a stop string.
        token_ids, log_probs: the sampled tokens with their log-probs.
        finish_reason: "stop", "length" or "tool_calls".
        num_prompt_tokens: length of the prompt.
    """

    message: Message
    text: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str
    num_prompt_tokens: int

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Tool calls in OpenAI's format: `{"id": ..., "function": {"name": ..., "arguments": JSON text}}`."""
        return self.message.get("tool_calls", [])


@dataclass(kw_only=True, slots=True)
class SessionState:
    """What all branches of a session share.

    Attributes:
        id: name of the session, unique in the run.
        seed: seed of the first reply; the seeds of later ones are derived from it. None: the engine chooses.
        engine: an engine, or a pool of them.
        template: the model's chat template.
        parser: parser of the replies.
        config: sampling parameters and limits.
        recorder: record of all turns.
        base_url, api_key: address and key of the session at its endpoint; empty without an endpoint.
        branches: whether each branch is trained on.
        num_requests: number of requests so far, running ones included.
        running: requests that the engine has not answered.
        num_returned_tokens: tokens that the engine has returned.
        is_ended: whether the episode has ended.
        limit: the limit that refused the last request of a client over HTTP; None if it was not refused.
        refusals: all limits that refused a request.
    """

    id: str
    seed: int | None
    engine: Engine
    template: ChatTemplate
    parser: ReplyParser
    config: SessionConfig
    recorder: Recorder
    base_url: str = ""
    api_key: str = ""
    branches: dict[str, bool] = field(default_factory=lambda: {"main": True})
    num_requests: int = 0
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    num_returned_tokens: int = 0
    is_ended: bool = False
    limit: LimitError | None = None
    refusals: list[LimitError] = field(default_factory=list)


class Session:
    """Generate replies and record them. `Policy.session` creates sessions.

    Args:
        state: what all branches share.
        branch: name of the branch whose history this session continues.
    """

    def __init__(self, state: SessionState, branch: str = "main") -> None:
        self._state = state
        self._branch = branch

    @property
    def id(self) -> str:
        """Name of the session, unique in the run."""
        return self._state.id

    @property
    def seed(self) -> int | None:
        """Seed of the session, a function of the run's seed, the problem and the sample; use it for the environment."""
        return self._state.seed

    @property
    def base_url(self) -> str:
        """Address for OpenAI-style clients, such as "http://127.0.0.1:8000/v1"; empty without an endpoint."""
        return self._state.base_url

    @property
    def api_key(self) -> str:
        """Key for `base_url`; it selects this session and branch. Empty without an endpoint."""
        key = self._state.api_key
        return f"{key}:{quote(self._branch)}" if key and self._branch != "main" else key

    def limit_of(self, reason: str) -> LimitError | None:
        """Return the limit that refused the last request of a client over HTTP, or the one that an error names."""
        return self._state.limit or next((limit for limit in self._state.refusals if str(limit) in reason), None)

    def note_refusal(self, limit: LimitError) -> None:
        """Note that a client over HTTP receives this limit, whose own error may not name it."""
        self._state.limit = limit

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return self._state.template

    @property
    def parses_tool_calls(self) -> bool:
        """Whether tool calls of the model are recognized; otherwise they remain in the content."""
        return self._state.parser.parses_tool_calls

    @property
    def recorder(self) -> Recorder:
        """Record of all turns."""
        return self._state.recorder

    async def generate(
        self,
        messages: Sequence[Message] | None = None,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Reply:
        """Generate a reply to a conversation, a text or a prompt of token ids, and record it.

        Args:
            messages: the whole conversation in OpenAI's format. Recorded replies in it are continued token by token.
            text: a prompt that is encoded without a chat template and without adding special tokens such as a BOS.
            token_ids: a prompt of token ids, also as an array or a tensor.
            tools: tools in OpenAI's format, for `messages`.
            sampling: fields of `SamplingParams` that differ from the session's.

        Raises:
            ValueError: not exactly one prompt, malformed messages, token ids outside of the vocabulary, or a sampling
                parameter that training or the engine cannot use.
            TemplateError: the chat template rejects the messages or ignores the tools.
            LimitError: the context length or the number of turns is reached.
            EngineError: the engine failed or timed out.
            SessionEndedError: the episode has ended.
        """
        state = self._state
        if state.is_ended:
            raise SessionEndedError(f"session {self.id} has ended; an episode must not use it after its return")
        changes = self._sampling_changes(sampling)
        if sum(value is not None for value in (messages, text, token_ids)) != 1:
            raise ValueError("generate() requires exactly one of messages, text and token_ids")
        if messages is not None:
            prompt = state.recorder.prompt_from_messages(check_messages(messages), tools, self._branch)
        else:
            ids = state.template.encode(text) if text is not None else token_ids
            assert ids is not None
            prompt = state.recorder.prompt_from_tokens(ids, self._branch)
        try:
            changes["max_tokens"] = self._max_tokens(changes.get("max_tokens"), prompt)
        except LimitError as error:
            state.refusals.append(error)
            raise
        state.limit = None
        number = state.num_requests
        if "seed" not in changes and state.seed is not None:
            changes["seed"] = request_seed(state.seed, number)
        params = replace(state.config.sampling, **changes)
        state.num_requests += 1
        return await self._request(prompt, params, number)

    def branch(self, name: str | None = None, *, is_trained: bool = True) -> "Session":
        """Return a session with a history of its own, for a sub-agent or an alternative.

        Its requests can continue what this session has recorded, as context that is not trained on.

        Args:
            name: name in the report; default "branch-1", "branch-2", ...
            is_trained: whether its replies become training rows.

        Raises:
            ValueError: the name is in use.
        """
        branches = self._state.branches
        if name is None:
            name = next(f"branch-{number}" for number in count(len(branches)) if f"branch-{number}" not in branches)
        if name in branches:
            raise ValueError(f"the branch {name!r} exists already; choose another name")
        branches[name] = is_trained
        self.recorder.add_branch(name, self._branch)
        return Session(self._state, name)

    def open_branch(self, name: str) -> "Session":
        """Return the session of an existing branch.

        Raises:
            ValueError: there is no such branch.
        """
        if name not in self._state.branches:
            raise ValueError(f"session {self.id} has no branch {name!r}, only {', '.join(self._state.branches)}")
        return Session(self._state, name)

    def connect(self, base_url: str, api_key: str) -> None:
        """Set the address for OpenAI-style clients. `Endpoint.add` calls it.

        Raises:
            ValueError: the session has an address already.
        """
        if self._state.api_key:
            raise ValueError(f"session {self.id} has the address {self.base_url} already; add a session only once")
        self._state.base_url, self._state.api_key = base_url, api_key

    def trajectories(self) -> list[Trajectory]:
        """Return the training rows of all trained branches."""
        return self.recorder.trajectories([name for name, is_trained in self._state.branches.items() if is_trained])

    async def end(self) -> None:
        """Cancel running requests and refuse new ones."""
        state = self._state
        state.is_ended = True
        for task in list(state.running):
            task.cancel()
        if state.running:
            await asyncio.wait(state.running, timeout=CANCEL_GRACE_S)

    def metrics(self, trajectories: Sequence[Trajectory] | None = None) -> dict[str, float]:
        """Return counts: requests, turns, sampled tokens, those with mask 1 and the reasons of new token sequences.

        A request that failed or was cancelled is no turn.
        `num_untrained_branch_tokens` are the sampled tokens of branches with `is_trained=False`. All others are trained
        on: the two numbers add up to `num_sampled_tokens`. `num_unused_tokens` are those of replies that arrived after
        the episode ended or the request was cancelled; they are not recorded.

        Args:
            trajectories: the result of `trajectories()`, where it is at hand.
        """
        rows = self.trajectories() if trajectories is None else trajectories
        turns, branches = self.recorder.turns, self._state.branches
        sampled = self.recorder.num_sampled_tokens(branches)
        untrained = self.recorder.num_sampled_tokens([name for name, is_trained in branches.items() if not is_trained])
        trained = sum(sum(row.response_mask) for row in rows)
        forks = {f"num_forks/{reason}": float(count) for reason, count in sorted(self.recorder.forks.items())}
        return {
            "num_requests": float(self._state.num_requests),
            "num_turns": float(len(turns)),
            "num_sampled_tokens": float(sampled),
            "num_trained_tokens": float(trained),
            "num_untrained_branch_tokens": float(untrained),
            "num_unused_tokens": float(self._state.num_returned_tokens - sampled),
            **forks,
        }

    def _finish_request(self, request: asyncio.Task[Generation]) -> None:
        self._state.running.discard(request)
        if not request.cancelled() and request.exception() is None:
            self._state.num_returned_tokens += len(request.result().token_ids)

    async def _request(self, prompt: Prompt, params: SamplingParams, number: int) -> Reply:
        state = self._state
        timeout_s = state.config.generate_timeout_s
        request = asyncio.create_task(state.engine.generate(list(prompt.token_ids), params, session_id=state.id))
        state.running.add(request)
        request.add_done_callback(self._finish_request)
        try:
            await asyncio.wait({request}, timeout=timeout_s)
            if not request.done():
                raise EngineError(
                    f"session {state.id}: the engine returned no reply within {timeout_s:g} s (prompt of "
                    f"{len(prompt.token_ids)} tokens)"
                )
        finally:
            request.cancel()
        if state.is_ended:
            raise SessionEndedError(f"session {self.id} ended before the engine replied")
        generation = request.result()
        text = state.template.decode(generation.token_ids)
        message = state.parser(
            _before_stop(text, params.stop) if generation.finish_reason == "stop" else text,
            reasoning_is_open=state.template.opens_reasoning(prompt.token_ids),
            has_tools=bool(prompt.tools),
            call_id=f"call-{number}",
        )
        state.recorder.record(prompt, generation, message)
        return Reply(
            message=message,
            text=text,
            token_ids=list(generation.token_ids),  # copies: the caller may change its own
            log_probs=list(generation.log_probs),
            finish_reason="tool_calls" if "tool_calls" in message else generation.finish_reason,
            num_prompt_tokens=len(prompt.token_ids),
        )

    def _sampling_changes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that a request changes."""
        given = {name: value for name, value in given.items() if value is not None}
        config = self._state.config
        own = config.sampling
        extra = {name: value for name, value in given.items() if name not in _SAMPLING_FIELDS}
        if config.is_training:
            refused = [
                name
                for name in given
                if name in extra or (name not in _FREE_IN_TRAINING and given[name] != getattr(own, name))
            ]
            if refused:
                values = ", ".join(f"{name}={given[name]!r}" for name in refused)
                run = f"temperature={own.temperature:g}, top_p={own.top_p:g}, top_k={own.top_k}"
                raise ValueError(
                    "the trainer computes log-probs at the run's temperature over the whole vocabulary and cannot "
                    f"account for {values}; remove it from the request, or change the parameters of the run ({run})"
                )
        changes = {name: value for name, value in given.items() if name in _SAMPLING_FIELDS}
        if isinstance(stop := changes.get("stop"), str):
            changes["stop"] = (stop,)
        elif stop is not None:
            changes["stop"] = tuple(stop)
        return {**changes, "extra": {**own.extra, **extra}} if extra else changes

    def _max_tokens(self, given: int | None, prompt: Prompt) -> int:
        """Return the limit of new tokens of a request."""
        config = self._state.config
        if len(self.recorder.turns) + len(self._state.running) >= config.max_turns:
            raise LimitError("turns", f"session {self.id} has reached its limit of {config.max_turns} turns")
        room = config.context_length - len(prompt.token_ids)
        if room < 1:
            raise LimitError(
                "length",
                f"session {self.id}: the prompt has {len(prompt.token_ids)} tokens, and the context length is "
                f"{config.context_length}; no reply fits",
            )
        limit = min(limit for limit in (given, config.sampling.max_tokens, room) if limit is not None)
        if limit < 1:
            raise ValueError(f"max_tokens must be >= 1, got {limit}")
        return limit


def _before_stop(text: str, stop: Sequence[str]) -> str:
    return text[: min((text.find(string) for string in stop if string in text), default=len(text))]


def request_seed(seed: int, number: int) -> int:
    """Return the seed of request `number`, from 0, of a session with `seed`: the session's own for the first one."""
    if number == 0:
        return seed
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint32)[0] >> 1)
