"""The record of a session: a tree of turns, each with the tokens that the engine received and sampled."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill_rollout.engine import Generation
from tidemill_rollout.messages import Message, identity
from tidemill_rollout.template import ChatTemplate
from tidemill_rollout.trajectory import Trajectory

_Key = tuple[str, Hashable, tuple[Hashable, ...]]  # branch, tools, messages


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
        children: turns that continue this one.
    """

    parent: "Turn | None"
    branch: str
    context_ids: list[int]
    messages: list[Message] | None
    tools: Sequence[Any] | None
    generation: Generation
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
        return [token for turn in self.path() for token in (*turn.context_ids, *turn.generation.token_ids)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The next request of a branch.

    Attributes:
        token_ids: the whole prompt.
        parent: the turn that it continues, or None.
        context_ids: the tokens of the prompt that follow the parent's last token.
        branch, messages, tools: as in `Turn`, without the reply.
    """

    token_ids: list[int]
    parent: Turn | None
    context_ids: list[int]
    branch: str
    messages: list[Message] | None
    tools: Sequence[Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """An example of a request that did not continue a recorded token sequence.

    Attributes:
        reason: "edited": an earlier message differs from the recorded one; "tools": other tools; "template": the chat
            template writes the history differently; "repeated": a second reply to the same messages; "unrelated": no
            common first message.
        expected, received: the recorded and the received messages or texts from the first difference.
    """

    reason: str
    expected: str
    received: str


class Recorder:
    """Record the turns of a session and turn them into trajectories.

    Args:
        template: the model's chat template.

    Attributes:
        forks: number of token sequences that were started by a request that could not continue one, by reason.
        fork_examples: the first of each reason.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._turns: list[Turn] = []
        self._by_messages: dict[_Key, Turn] = {}
        self.forks: Counter[str] = Counter()
        self.fork_examples: dict[str, Fork] = {}

    @property
    def turns(self) -> Sequence[Turn]:
        """All turns in the order in which they ended."""
        return self._turns

    def prompt_from_messages(self, messages: list[Message], tools: Sequence[Any] | None, branch: str) -> Prompt:
        """Return the prompt of a conversation: the recorded tokens of its longest recorded part, then new tokens.

        Args:
            messages: result of `check_messages`.
            tools: tools in OpenAI's format.
            branch: name of the branch.

        Raises:
            TemplateError: the chat template rejects the messages.
        """
        parent = self._find(messages, tools, branch)
        if parent is not None:
            assert parent.messages is not None
            history, new = parent.messages, messages[len(parent.messages) :]
            last_token = self._last_token(parent.generation)
            text = self._template.suffix(history, new, tools, last_token)
            if text is not None:
                if parent.children:
                    self._count_fork(self._sibling_reason(parent, messages), parent.children[0].messages, messages)
                context = self._template.encode(text)
                return Prompt(
                    token_ids=parent.token_ids() + context,
                    parent=parent,
                    context_ids=context,
                    branch=branch,
                    messages=messages,
                    tools=tools,
                )
        text = self._template.render(messages, tools, add_generation_prompt=True)
        if parent is not None:
            assert parent.messages is not None
            before = self._template.render(parent.messages, tools, add_generation_prompt=False)
            self._count_difference("template", before, text)
        else:
            self._count_new_root(messages, tools, branch)
        ids = self._template.encode(text)
        return Prompt(token_ids=ids, parent=None, context_ids=ids, branch=branch, messages=messages, tools=tools)

    def prompt_from_tokens(self, token_ids: Sequence[int], branch: str) -> Prompt:
        """Return a prompt of exactly these tokens, continuing the longest recorded sequence among its prefixes."""
        ids = list(token_ids)
        best, length = None, 0
        for turn in self._turns:
            if turn.branch == branch:
                recorded = turn.token_ids()
                if length < len(recorded) < len(ids) and ids[: len(recorded)] == recorded:
                    best, length = turn, len(recorded)
        return Prompt(token_ids=ids, parent=best, context_ids=ids[length:], branch=branch, messages=None, tools=None)

    def record(self, prompt: Prompt, generation: Generation, reply: Message) -> Turn:
        """Add the turn of a finished request."""
        messages = None if prompt.messages is None else [*prompt.messages, reply]
        turn = Turn(
            parent=prompt.parent,
            branch=prompt.branch,
            context_ids=prompt.context_ids,
            messages=messages,
            tools=prompt.tools,
            generation=generation,
        )
        if prompt.parent is not None:
            prompt.parent.children.append(turn)
        self._turns.append(turn)
        if messages is not None:
            self._by_messages[_key(turn.branch, turn.tools, messages)] = turn
        return turn

    def trajectories(self, branches: Sequence[str]) -> list[Trajectory]:
        """Return one trajectory for each token sequence of these branches that nothing continues."""
        trained: set[int] = set()
        rows = []
        for turn in self._turns:
            if turn.branch in branches and not turn.children:
                rows.append(_trajectory(turn.path(), trained))
        return rows

    def _find(self, messages: list[Message], tools: Sequence[Any] | None, branch: str) -> Turn | None:
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] == "assistant":
                turn = self._by_messages.get(_key(branch, tools, messages[:count]))
                if turn is not None:
                    return turn
        return None

    def _last_token(self, generation: Generation) -> str:
        if generation.finish_reason != "stop" or not generation.token_ids:
            return ""
        return self._template.tokenizer.convert_ids_to_tokens(generation.token_ids[-1])  # type: ignore[return-value]

    def _sibling_reason(self, parent: Turn, messages: list[Message]) -> str:
        asked = [identity(message) for message in messages]
        same = any(
            child.messages is not None and asked == [identity(message) for message in child.messages[:-1]]
            for child in parent.children
        )
        return "repeated" if same else "edited"

    def _count_new_root(self, messages: list[Message], tools: Sequence[Any] | None, branch: str) -> None:
        """Count why a request of a branch with recorded conversations does not continue any of them."""
        asked = [identity(message) for message in messages]
        best: tuple[int, Turn] | None = None
        for turn in self._turns:
            if turn.branch == branch and turn.messages is not None:
                recorded = [identity(message) for message in turn.messages]
                common = _common_length(asked, recorded)
                if best is None or common > best[0]:
                    best = common, turn
        if best is None:
            return
        common, turn = best
        assert turn.messages is not None
        if common == 0:
            reason = "unrelated"
        elif _tools_key(turn.tools) != _tools_key(tools):
            reason = "tools"
        else:
            reason = "repeated" if common == len(asked) else "edited"
        received = tools if reason == "tools" else messages[common:]
        self._count_fork(reason, turn.tools if reason == "tools" else turn.messages[common:], received)

    def _count_difference(self, reason: str, expected: str, received: str) -> None:
        start = max(0, _common_length(expected, received) - 40)
        self._count_fork(reason, expected[start:], received[start:])

    def _count_fork(self, reason: str, expected: Any, received: Any) -> None:
        self.forks[reason] += 1
        if reason not in self.fork_examples:
            self.fork_examples[reason] = Fork(reason=reason, expected=_shorten(expected), received=_shorten(received))


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
        if id(turn) in trained:
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
    )


def _joined(runs: list[tuple[str, int]], new: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    for version, count in new:
        if runs and runs[-1][0] == version:
            runs[-1] = version, runs[-1][1] + count
        else:
            runs.append((version, count))
    return runs


def _key(branch: str, tools: Sequence[Any] | None, messages: Sequence[Message]) -> _Key:
    return branch, _tools_key(tools), tuple(identity(message) for message in messages)


def _tools_key(tools: Sequence[Any] | None) -> Hashable:
    return repr(list(tools)) if tools else None


def _common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 2000 else f"{text[:2000]}..."
