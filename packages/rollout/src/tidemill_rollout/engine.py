"""An engine: token ids in; sampled token ids and their log-probs out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tidemill_rollout.errors import EngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How an engine samples.

    Attributes:
        max_tokens: maximum number of new tokens; None leaves it to the limits of the session.
        temperature: divides the logits; 0 decodes greedily. Log-probs are those at this temperature, and for 0 those
            at 1.
        top_p, top_k: restrict sampling to the most probable tokens; 1.0 and -1 are off. Log-probs are those of the
            whole vocabulary, before this restriction.
        stop: strings that end the generation. The text before and of the stop string remains in the tokens.
        seed: seed of this request, an int64; None: a random one. SGLang uses it only with
            `--enable-deterministic-inference`.
        extra: further parameters of the engine, such as penalties, that a trainer cannot reproduce.

    Raises:
        ValueError: the seed or `top_k` does not fit into the engine's integers, so SGLang would crash; or a stop
            string is empty.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be >= -2**63 and < 2**63, got {self.seed}")
        if not -(2**31) <= self.top_k < 2**31:
            raise ValueError(f"top_k must be < 2**31, got {self.top_k}; -1 turns it off")
        if not all(self.stop):
            raise ValueError(f"stop must contain strings that are not empty, got {list(self.stop)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The tokens that an engine sampled for one request.

    Attributes:
        token_ids: the sampled tokens, including the token that ended the generation.
        log_probs: log-prob of each token at the sampling temperature (1 for greedy decoding) over the whole vocabulary,
            before `top_p`, `top_k` and greedy decoding restrict the choice.
        finish_reason: "stop": an end token or a stop string; "length": the limit of new tokens.
        versions: weight versions as runs (version, number of tokens), in order.
        extra: further data of the engine for this request, such as the routed experts of a MoE model.

    Raises:
        EngineError: the numbers of tokens, log-probs and versions differ, or a log-prob is missing, positive or not
            finite. They are never filled in.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    versions: Sequence[tuple[str, int]]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if len(self.log_probs) != count:
            raise EngineError(f"expected one log-prob per sampled token, got {len(self.log_probs)} for {count} tokens")
        for number, value in enumerate(self.log_probs):
            if value is None or not -math.inf < value <= 0:  # also True for NaN
                raise EngineError(
                    f"the log-prob of a sampled token must be finite and <= 0, got {value} for token {number} of "
                    f"{count} (id {self.token_ids[number]})"
                )
        if (total := sum(length for _, length in self.versions)) != count:
            raise EngineError(f"expected a weight version for each of {count} sampled tokens, got {total}")


class Engine(Protocol):
    """Anything that samples tokens for a prompt of token ids."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        """Sample one continuation.

        Args:
            token_ids: the whole prompt.
            sampling: sampling parameters; `max_tokens` is set.
            session_id: equal for all requests of a session, so that a router can use the prefix cache.

        Raises:
            EngineError: the engine failed. Cancelling the call frees the request in the engine.
        """
        ...
