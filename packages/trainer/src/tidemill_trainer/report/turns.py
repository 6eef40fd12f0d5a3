"""The turns of an episode as HTML: messages, tool calls, and every token with its numbers."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tidemill_trainer.report.elements import plural, text_block
from tidemill_trainer.report.episode import Token, TokenSequence, Turn

# |rollout - training| log-prob below which a token has the class d0, d1, d2; the others have d3.
_DIFFERENCES = (0.02, 0.1, 0.5)
LEGEND = (
    '<p class="legend">Tokens: <i>context, not trained on</i> '
    '<i class="m">trained on, without training log-prob</i> |rollout - training log-prob| '
    + " ".join(f'<i class="m d{number}">&lt; {bound:g}</i>' for number, bound in enumerate(_DIFFERENCES))
    + f' <i class="m d{len(_DIFFERENCES)}">&ge; {_DIFFERENCES[-1]:g}</i>. '
    "Hover over a token for its id, log-probs, advantage and weight version.</p>"
)


def sequence_html(sequence: TokenSequence, max_tokens: int) -> str:
    """Return the turns of a token sequence.

    Args:
        max_tokens: about as many tokens are shown; of a longer context or reply the first and the last ones.
    """
    parts = 2 * len(sequence.turns)
    turns = "".join(_turn(number, turn, max(40, max_tokens // parts)) for number, turn in enumerate(sequence.turns, 1))
    name = f"{sequence.branch}: finish reason {sequence.finish_reason}"
    return f'<section class="sequence"><h4>Branch {escape(name)}</h4>{turns}</section>'


def _turn(number: int, turn: Turn, max_tokens: int) -> str:
    if turn.messages is None:
        body = text_block("context", turn.texts[0]) + text_block("reply", turn.texts[1], kind="assistant")
        calls = 0
    else:
        body = "".join(map(_message, turn.messages))
        calls = len(turn.messages[-1].get("tool_calls") or [])
    facts = [plural(len(turn.context), "context token"), plural(len(turn.sampled), "sampled token")]
    facts += [plural(calls, "tool call")] if calls else []
    tokens = "".join(_tokens(part, max_tokens) for part in (turn.context, turn.sampled))
    return (
        f'<div class="turn"><h5>Turn {number} <small>{", ".join(facts)}</small></h5>{body}'
        f"<details><summary>Tokens <small>{_largest_difference(turn.sampled)}</small></summary>"
        f'<div class="text tokens">{tokens}</div></details></div>'
    )


def _largest_difference(tokens: Sequence[Token]) -> str:
    differences = [difference for token in tokens if (difference := _log_prob_difference(token)) is not None]
    return f"largest log-prob difference {max(differences):.2g}" if differences else ""


def content_of(message: Mapping[str, Any]) -> str:
    """Return the content of a message in OpenAI's format as text; empty if it has none."""
    content = message.get("content")
    return "" if content is None else _plain(content)


def _message(message: Mapping[str, Any]) -> str:
    """Return one block for the reasoning, the content and each tool call of a message in OpenAI's format."""
    role, content, calls = str(message["role"]), content_of(message), message.get("tool_calls") or []
    parts = []
    if reasoning := message.get("reasoning_content"):
        parts.append(text_block(f"{role}: reasoning", _plain(reasoning)))
    if content or not calls:
        name = f"{role} {message['name']}" if "name" in message else role
        kind = role if role in ("assistant", "tool") else ""
        parts.append(text_block(name, content, kind=kind))
    for call in calls:
        function = call["function"]
        arguments = _plain(function.get("arguments", ""))
        parts.append(text_block("tool call", arguments, kind="call", title=str(function["name"])))
    return "".join(parts)


def _plain(value: Any) -> str:
    """Return text unchanged, and other values, such as a list of content parts, as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tokens(tokens: Sequence[Token], max_tokens: int) -> str:
    """Return all tokens, or the first and the last ones if there are more than `max_tokens`."""
    num_left_out = max(0, len(tokens) - max_tokens)
    first = max_tokens - max_tokens // 2
    head, tail = (tokens[:first], tokens[first + num_left_out :]) if num_left_out else (tokens, [])
    gap = f'<b class="cut"> … {num_left_out} more tokens … </b>' if num_left_out else ""
    return f"{_marked(head)}{gap}{_marked(tail)}"


def _marked(tokens: Sequence[Token]) -> str:
    """Return the tokens, with a mark where a weight version begins."""
    parts, version = [], None
    for token in tokens:
        if token.version is not None and token.version != version:
            version = token.version
            parts.append(f"<sup>{'v' * version.isdigit()}{escape(version)}</sup>")
        parts.append(_token(token))
    return "".join(parts)


def _token(token: Token) -> str:
    text = escape(token.text or f"⟨{token.token_id}⟩").replace("\n", "↵\n")
    if not token.is_trained:
        return f'<i title="id {token.token_id}">{text}</i>'
    difference = _log_prob_difference(token)
    level = "" if difference is None else f" d{sum(difference >= bound for bound in _DIFFERENCES)}"
    numbers = (("rollout", token.rollout), ("training", token.training), ("advantage", token.advantage))
    facts = [f"id {token.token_id}", *(f"{name} {value:.4g}" for name, value in numbers if value is not None)]
    facts += [] if token.version is None else [f"version {token.version}"]
    return f'<i class="m{level}" title="{escape(", ".join(facts))}">{text}</i>'


def _log_prob_difference(token: Token) -> float | None:
    if token.rollout is None or token.training is None:
        return None
    difference = abs(token.rollout - token.training)
    return difference if math.isfinite(difference) else math.inf
