"""The record of a session: a tree of turns, each with the tokens that the engine received and sampled."""

import json
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from operator import index
from typing import Any

from tidemill_rollout.engine import Generation
from tidemill_rollout.fork import Fork, common_length, fork
from tidemill_rollout.history import History
from tidemill_rollout.messages import Message, canonical, clean_message, identity
from tidemill_rollout.template import ChatTemplate, Fingerprint
from tidemill_rollout.trajectory import Trajectory


@dataclass(eq=False, slots=True)
class Turn:
    """One reply with the context that was added for it.

    Attributes:
        parent: the turn that it continues; None at the start of a token sequence.
        branch: name of the branch.
        context_ids: tokens between the parent's last token and the reply; for a first turn the whole prompt.
        messages: all messages up to and including the reply; None for a prompt of text or token ids.
        tools: tools that the prompt was rendered with.
        generation: the sampled tokens.
        fingerprint: of the template's text of the prompt; None for a prompt of text or token ids.
        children: turns that continue this one.
    """

    parent: "Turn | None"
    branch: str
    context_ids: list[int]
    messages: list[Message] | None
    tools: Sequence[Any] | None
    generation: Generation
    fingerprint: Fingerprint | None = None
    children: list["Turn"] = field(default_factory=list)

    def path(self) -> list["Turn"]:
        """Return the turns from the first one to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def token_ids(self) -> list[int]:
        """Return all tokens up to the end of the reply."""
        ids: list[int] = []
        for turn in self.path():
            ids += turn.context_ids
            ids += turn.generation.token_ids
        return ids

    def is_last(self) -> bool:
        """Return whether no turn of the same branch continues this one."""
        return all(child.branch != self.branch for child in self.children)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The next request of a branch.

    Attributes:
        token_ids: the whole prompt.
        parent: the turn that it continues, or None.
        context_ids: the tokens of the prompt that follow the parent's last token.
        branch, messages, tools, fingerprint: as in `Turn`, without the reply.
        identities: for each message what it is compared by.
        fork: why the chat template prevents the continuation of a recorded turn, or None.
    """

    token_ids: list[int]
    parent: Turn | None
    context_ids: list[int]
    branch: str
    messages: list[Message] | None = None
    tools: Sequence[Any] | None = None
    fingerprint: Fingerprint | None = None
    identities: tuple[Hashable, ...] = ()
    fork: Fork | None = None


class Recorder:
    """Record the turns of a session and turn them into trajectories.

    Args:
        template: the model's chat template.

    Attributes:
        forks: number of token sequences that were started by a request that could not continue one, by reason. A branch
            has one sequence plus one for each of its forks.
        fork_examples: the first of each reason.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._turns: list[Turn] = []
        self._starts: list[Turn] = []  # turns without a parent
        self._started: set[str] = set()  # branches with turns
        self._histories: dict[str, dict[str, History]] = {}  # by branch and tools
        self._origins: dict[str, str] = {}
        self.forks: Counter[str] = Counter()
        self.fork_examples: dict[str, Fork] = {}

    @property
    def turns(self) -> Sequence[Turn]:
        """All turns in the order in which they ended."""
        return self._turns

    def add_branch(self, name: str, origin: str) -> None:
        """Add a branch, whose requests can also continue what is recorded in the branch `origin`."""
        self._origins[name] = origin

    def num_sampled_tokens(self, branches: Collection[str]) -> int:
        """Return the number of sampled tokens of these branches."""
        return sum(len(turn.generation.token_ids) for turn in self._turns if turn.branch in branches)

    def prompt_from_messages(self, messages: list[Message], tools: Sequence[Any] | None, branch: str) -> Prompt:
        """Return the prompt of a conversation: the recorded tokens of its longest recorded part, then new tokens.

        Args:
            messages: result of `check_messages`.
            tools: tools in OpenAI's format.
            branch: name of the branch.

        Raises:
            ValueError: the tools are not JSON.
            TemplateError: the chat template rejects the messages.
        """
        identities = tuple(identity(message) for message in messages)
        parent = self._find(messages, identities, tools, branch)
        refused: Fork | None = None
        if parent is not None:
            assert parent.messages is not None
            count = len(parent.messages)
            edited = _place_of_other_reasoning(parent.messages, messages)
            if edited is not None:
                refused = fork("edited", _json(parent.messages[edited:]), _json(messages[edited:]))
            else:
                messages, tools = [*parent.messages, *messages[count:]], parent.tools  # clients drop the reasoning
                suffix = self._template.suffix(
                    messages, count, tools, generation=parent.generation, fingerprint=parent.fingerprint
                )
                if not isinstance(suffix, Fork):
                    context, text = suffix
                    ids = parent.token_ids() + context
                    fingerprint = self._template.fingerprint(text)
                    return Prompt(ids, parent, context, branch, messages, tools, fingerprint, identities)
                refused = suffix
        tools = deepcopy(tools)  # the caller may change its own
        text = self._template.render(messages, tools, add_generation_prompt=True)
        ids = self._template.encode(text)
        fingerprint = self._template.fingerprint(text)
        return Prompt(ids, None, ids, branch, messages, tools, fingerprint, identities, refused)

    def prompt_from_tokens(self, token_ids: Sequence[int], branch: str) -> Prompt:
        """Return a prompt of exactly these tokens, continuing the longest recorded sequence among its prefixes.

        Raises:
            ValueError: new tokens are outside of the vocabulary, with which SGLang would crash.
        """
        ids = [index(token) for token in token_ids]
        lineage = list(self._lineage(branch))
        best, length = None, 0
        candidates = [(turn, 0) for turn in self._starts]
        while candidates:
            turn, start = candidates.pop()
            middle = start + len(turn.context_ids)
            end = middle + len(turn.generation.token_ids)
            if ids[start:middle] == turn.context_ids and ids[middle:end] == list(turn.generation.token_ids):
                candidates += [(child, end) for child in turn.children]
                if turn.branch in lineage and end > length:
                    best, length = turn, end
        new, size = ids[length:], self._template.vocab_size
        wrong = [token for token in new if not 0 <= token < size]
        if wrong:
            raise ValueError(f"token_ids must be >= 0 and < {size}, the size of the vocabulary, got {wrong[0]}")
        return Prompt(ids, best, new, branch)

    def record(self, prompt: Prompt, generation: Generation, reply: Message) -> Turn:
        """Add the turn of a finished request."""
        reply = clean_message(reply)  # a copy: the caller may change its own
        messages = None if prompt.messages is None else [*prompt.messages, reply]
        turn = Turn(
            parent=prompt.parent,
            branch=prompt.branch,
            context_ids=prompt.context_ids,
            messages=messages,
            tools=prompt.tools,
            generation=generation,
            fingerprint=prompt.fingerprint,
        )
        if self._is_fork(prompt):
            found = self._explain(prompt)
            self.forks[found.reason] += 1
            self.fork_examples.setdefault(found.reason, found)
        siblings = self._starts if prompt.parent is None else prompt.parent.children
        siblings.append(turn)
        self._turns.append(turn)
        self._started.add(turn.branch)
        if messages is not None:
            histories = self._histories.setdefault(turn.branch, {})
            histories.setdefault(_tools_key(turn.tools), History()).add((*prompt.identities, identity(reply)), turn)
        return turn

    def trajectories(self, branches: Collection[str]) -> list[Trajectory]:
        """Return one trajectory for each token sequence of these branches that nothing in its branch continues."""
        trained: set[int] = set()
        return [_trajectory(turn.path(), trained) for turn in self._turns if turn.branch in branches and turn.is_last()]

    def _lineage(self, branch: str) -> Iterator[str]:
        name: str | None = branch
        while name is not None:
            yield name
            name = self._origins.get(name)

    def _find(
        self, messages: list[Message], identities: tuple[Hashable, ...], tools: Sequence[Any] | None, branch: str
    ) -> Turn | None:
        """Return the turn that recorded the longest part of a request, of the branch itself if several did."""
        key = _tools_key(tools)
        best, length = None, 0
        for name in self._lineage(branch):
            history = self._histories.get(name, {}).get(key)
            turns = [] if history is None else history.longest(identities)
            if turns and turns[0].messages is not None and len(turns[0].messages) > length:
                best, length = turns, len(turns[0].messages)
        return None if best is None else _best_of(best, messages[length - 1])

    def _is_fork(self, prompt: Prompt) -> bool:
        parent = prompt.parent
        if parent is None or parent.branch != prompt.branch:
            return prompt.branch in self._started
        return not parent.is_last()

    def _explain(self, prompt: Prompt) -> Fork:
        """Return why a request starts a token sequence, as the first difference from what the branch has recorded."""
        if prompt.fork is not None:
            return prompt.fork
        if prompt.messages is None:
            siblings = self._starts if prompt.parent is None else prompt.parent.children
            others = [turn.context_ids for turn in siblings if turn.branch == prompt.branch]
            expected = max(others, key=lambda ids: common_length(ids, prompt.context_ids), default=[])
            texts = [str(self._template.tokenizer.decode(ids)) for ids in (expected, prompt.context_ids)]
            return fork("repeated" if expected == prompt.context_ids else "edited", *texts)
        histories = self._histories.get(prompt.branch, {})
        own = histories.get(_tools_key(prompt.tools), History())
        others = [history for history in histories.values() if history is not own]
        common, turn = own.common(prompt.identities)
        best, other = max((history.common(prompt.identities) for history in others), default=(0, None), key=_length)
        if other is not None and (turn is None or best > common):
            if _has_more_than_system(prompt.messages[:best]):
                return fork("tools", _json(other.tools), _json(prompt.tools))
            common, turn = best, other
        if turn is None or turn.messages is None:
            return fork("unrelated", "", _json(prompt.messages))
        recorded, asked = turn.messages[common:], prompt.messages[common:]
        if not asked:
            reason = "repeated" if own.has_reply(prompt.identities) else "shortened"
        elif any(identity(message) == prompt.identities[common] for message in recorded):
            reason = "shortened"
        else:
            reason = "edited" if _has_more_than_system(prompt.messages[:common]) else "unrelated"
        return fork(reason, _json(recorded), _json(asked))


def _best_of(turns: list[Turn], reply: Message) -> Turn:
    """Return which of several turns with equal replies is meant: equal ids and reasoning, else one without a child."""

    def rank(turn: Turn) -> tuple[bool, bool, bool]:
        assert turn.messages is not None
        own = turn.messages[-1]
        same_reasoning = own.get("reasoning_content") == reply.get("reasoning_content")
        return _call_ids(own) == _call_ids(reply), same_reasoning, not turn.children

    return max(turns, key=rank)


def _place_of_other_reasoning(recorded: Sequence[Message], sent: Sequence[Message]) -> int | None:
    """Return the first message that was sent with another reasoning than the recorded one; missing is the same."""
    for number, (own, other) in enumerate(zip(recorded, sent, strict=False)):
        reasoning = str(other.get("reasoning_content", "")).strip()
        if reasoning and reasoning != own.get("reasoning_content", "").strip():
            return number
    return None


def _call_ids(reply: Message) -> list[Any]:
    return [call.get("id") for call in reply.get("tool_calls", ())]


def _has_more_than_system(messages: Sequence[Message]) -> bool:
    return any(message["role"] not in ("system", "developer") for message in messages)


def _length(found: tuple[int, Turn | None]) -> int:
    return found[0]


def _tools_key(tools: Sequence[Any] | None) -> str:
    return canonical(list(tools)) if tools else ""


def _json(values: Sequence[Any] | None) -> str:
    return "\n".join(json.dumps(value, ensure_ascii=False) for value in values or ())


def _trajectory(path: list[Turn], trained: set[int]) -> Trajectory:
    token_ids = list(path[0].context_ids)
    mask: list[int] = []
    log_probs: list[float] = []
    versions: list[tuple[str, int]] = []
    for number, turn in enumerate(path):
        if number > 0:
            token_ids += turn.context_ids
            mask += [0] * len(turn.context_ids)
            log_probs += [0.0] * len(turn.context_ids)
        count = len(turn.generation.token_ids)
        token_ids += turn.generation.token_ids
        if id(turn) in trained or turn.branch != path[-1].branch:
            mask += [0] * count
            log_probs += [0.0] * count
        else:
            trained.add(id(turn))
            mask += [1] * count
            log_probs += turn.generation.log_probs
            versions = _joined(versions, turn.generation.versions)
    return Trajectory(
        token_ids=token_ids,
        num_prompt_tokens=len(path[0].context_ids),
        response_mask=mask,
        rollout_log_probs=log_probs,
        versions=versions,
        branch=path[-1].branch,
        finish_reason=path[-1].generation.finish_reason,
        turns=[(len(turn.context_ids), len(turn.generation.token_ids)) for turn in path],
        messages=deepcopy(path[-1].messages),  # the caller may change its own
        extra=path[-1].generation.extra,
    )


def _joined(runs: list[tuple[str, int]], new: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    for version, count in new:
        if runs and runs[-1][0] == version:
            runs[-1] = version, runs[-1][1] + count
        else:
            runs.append((version, count))
    return runs
