"""The saved episodes of a run, as read from `rollouts.jsonl`."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeVar

NUM_SHOWN = 40  # episodes in a report
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One token of an episode.

    Attributes:
        is_trained: whether the token is trained on (mask 1); the other attributes below are None if it is not.
        rollout, training: log-prob of the token in the rollout and in training; None if the run does not have it.
        version: weight version that sampled the token.
    """

    text: str
    token_id: int
    is_trained: bool = False
    rollout: float | None = None
    training: float | None = None
    advantage: float | None = None
    version: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One reply and the context that was added for it.

    Attributes:
        messages: messages of the context, then the reply, in OpenAI's format; None if the run has none.
    """

    context: Sequence[Token]
    sampled: Sequence[Token]
    messages: Sequence[Mapping[str, Any]] | None
    texts: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """A row that an episode trains on: the turns of one branch."""

    branch: str
    finish_reason: str
    turns: Sequence[Turn]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a saved episode. A run without environments has only `step`."""

    step: int
    data_source: str
    status: str
    reason: str
    seconds: float | None
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Outcome":
        return cls(
            step=line["step"],
            data_source=str(line.get("data_source", "")),
            status=str(line.get("status", "ok")),
            reason=str(line.get("reason", "")),
            seconds=line.get("seconds"),
            metrics=line.get("metrics", {}),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A line of `rollouts.jsonl`. A run without environments has no `name` and no `sequences`."""

    name: str
    outcome: Outcome
    prompt: str
    response: str
    ground_truth: str
    score: float | None
    acc: float | None
    sequences: Sequence[TokenSequence]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Episode":
        return cls(
            name=str(line.get("episode", "")),
            outcome=Outcome.of(line),
            prompt=str(line["prompt"]),
            response=str(line["response"]),
            ground_truth=str(line["ground_truth"]),
            score=line["score"],
            acc=line["acc"],
            sequences=[_sequence(row) for row in line.get("rows", [])],
        )


def choose(outcomes: Sequence[Outcome]) -> set[int]:
    """Return the indices of about `NUM_SHOWN` episodes, spread evenly over the steps and over each step's episodes."""
    by_step: dict[int, list[int]] = defaultdict(list)
    for index, outcome in enumerate(outcomes):
        by_step[outcome.step].append(index)
    per_step = max((len(indices) for indices in by_step.values()), default=1)
    steps = _spread(sorted(by_step), max(2, NUM_SHOWN // per_step))
    count = NUM_SHOWN // max(1, len(steps))
    return {index for step in steps for index in _spread(by_step[step], count)}


def _spread(items: Sequence[_Item], count: int) -> Sequence[_Item]:
    """Return at most `count` items, evenly spaced, with the first and the last one."""
    if len(items) <= count:
        return items
    return [items[number * (len(items) - 1) // max(1, count - 1)] for number in range(count)]


def _sequence(row: Mapping[str, Any]) -> TokenSequence:
    tokens = list(_tokens(row))
    messages = _messages_by_turn(row["messages"], len(row["turns"]))
    turns, start = [], 0
    texts = row["texts"] if row["messages"] is None else [("", "")] * len(row["turns"])
    for (context, sampled), own, text in zip(row["turns"], messages, texts, strict=True):
        middle, end = start + context, start + context + sampled
        turns.append(Turn(context=tokens[start:middle], sampled=tokens[middle:end], messages=own, texts=text))
        start = end
    return TokenSequence(branch=str(row["branch"]), finish_reason=str(row["finish_reason"]), turns=turns)


def _tokens(row: Mapping[str, Any]) -> Iterator[Token]:
    """Yield the tokens of a row. A row that is not trained on has no `old_log_probs` and `advantages`."""
    mask = row["response_mask"]
    num_prompt = len(row["token_ids"]) - len(mask)
    versions = chain.from_iterable(repeat(str(version), count) for version, count in row["versions"])
    columns = [row.get(name) for name in ("rollout_log_probs", "old_log_probs", "advantages")]
    for index, (token_id, text) in enumerate(zip(row["token_ids"], row["tokens"], strict=True)):
        place = index - num_prompt
        if place < 0 or not mask[place]:
            yield Token(text=text, token_id=token_id)
            continue
        rollout, training, advantage = (None if column is None else column[place] for column in columns)
        yield Token(
            text=text,
            token_id=token_id,
            is_trained=True,
            rollout=rollout,
            training=training,
            advantage=advantage,
            version=next(versions, None),
        )


def _messages_by_turn(
    messages: Sequence[Mapping[str, Any]] | None, num_turns: int
) -> Sequence[Sequence[Mapping[str, Any]] | None]:
    """Split a conversation after each of its last `num_turns` replies; earlier ones are part of the prompt."""
    replies = [number for number, message in enumerate(messages or []) if message["role"] == "assistant"]
    if messages is None or len(replies) < num_turns:
        return [None] * num_turns
    ends = [number + 1 for number in replies[len(replies) - num_turns :]]
    return [messages[start:end] for start, end in zip([0, *ends], ends, strict=False)]
