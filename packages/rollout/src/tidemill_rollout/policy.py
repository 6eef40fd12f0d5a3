"""The policy: an engine with the model's tokenizer and chat template, from which sessions are created."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tidemill_rollout.endpoint import Endpoint
from tidemill_rollout.engine import Engine
from tidemill_rollout.episode import EpisodeFn, EpisodeResult, run_episode
from tidemill_rollout.parser import ReplyParser, tool_call_parser
from tidemill_rollout.problem import Problem
from tidemill_rollout.recorder import Recorder
from tidemill_rollout.session import Session, SessionConfig, SessionState
from tidemill_rollout.template import ChatTemplate


class Policy:
    """An engine, and what is needed to talk to its model.

    Args:
        engine: an engine, or a pool of them.
        tokenizer: the model's tokenizer, or the path or name that `AutoTokenizer` loads.
        config: sampling parameters and limits of the sessions.
        template_kwargs: variables of the chat template, such as `{"enable_thinking": False}`.
        keep_reasoning: continue the sampled tokens where the template would remove the reasoning of earlier replies
            (see `ChatTemplate`).
        endpoint: endpoint at which `run` serves each session while its episode runs.

    Raises:
        TypeError: `engine` is a string.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase | str,
        config: SessionConfig | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        keep_reasoning: bool = False,
        endpoint: Endpoint | None = None,
    ) -> None:
        if isinstance(engine, str):
            raise TypeError(f"engine must be an object such as SGLangServer(url), got {engine!r}")
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.engine = engine
        self.config = SessionConfig() if config is None else config
        self.template = ChatTemplate(self.tokenizer, kwargs=template_kwargs, keep_reasoning=keep_reasoning)
        source = self.template.source or ""
        self.parser = ReplyParser(tool_call_parser(source), has_reasoning="</think>" in source)
        self.endpoint = endpoint
        self._num_sessions = 0

    def session(self, id: str | None = None, *, seed: int | None = None, **changes: Any) -> Session:
        """Create a session.

        Args:
            id: name of the session, unique in the run; default "session-1", "session-2", ...
            seed: seed of the session, for the environment and the seeds of the requests; None: random requests.
            changes: fields of `SessionConfig` that differ from those of the policy.

        Raises:
            ValueError: the seed is negative or does not fit into an int64.
        """
        if seed is not None and not 0 <= seed < 2**63:
            raise ValueError(f"the seed of a session must be >= 0 and < 2**63, got {seed}")
        self._num_sessions += 1
        return Session(
            SessionState(
                id=f"session-{self._num_sessions}" if id is None else id,
                seed=seed,
                engine=self.engine,
                template=self.template,
                parser=self.parser,
                config=replace(self.config, **changes) if changes else self.config,
                recorder=Recorder(self.template),
            )
        )

    async def run(
        self, episode: EpisodeFn, problem: Problem, *, seed: int | None = None, timeout_s: float = float("inf")
    ) -> EpisodeResult:
        """Run an episode in a new session; see `run_episode`."""
        session = self.session(seed=seed)
        if self.endpoint is None:
            return await run_episode(episode, problem, session, timeout_s=timeout_s)
        self.endpoint.add(session)
        try:
            return await run_episode(episode, problem, session, timeout_s=timeout_s)
        finally:
            self.endpoint.remove(session)
