"""The conversations of a branch as a tree of messages, in which the recorded part of a request is found."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill_rollout.recorder import Turn


class _Node:
    """The messages from the root to here: turns whose reply is the last of them, and what follows."""

    __slots__ = ("children", "latest", "turns")

    def __init__(self) -> None:
        self.children: dict[Hashable, _Node] = {}
        self.turns: list[Turn] = []
        self.latest: Turn | None = None


class History:
    """Turns by the messages that lead to them. Each method takes time proportional to the number of messages."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, messages: Sequence[Hashable], turn: "Turn") -> None:
        """Add a turn whose reply is the last of these messages (see `identity`)."""
        node = self._root
        for message in messages:
            following = node.children.get(message)
            if following is None:
                following = node.children[message] = _Node()
            node = following
            node.latest = turn
        node.turns.append(turn)

    def longest(self, messages: Sequence[Hashable]) -> list["Turn"]:
        """Return the turns that recorded the longest part of a request: several for equal replies, or none."""
        node, turns = self._root, []
        for message in messages:
            following = node.children.get(message)
            if following is None:
                break
            node = following
            if node.turns:
                turns = node.turns
        return turns

    def common(self, messages: Sequence[Hashable]) -> tuple[int, "Turn | None"]:
        """Return how many messages are recorded, and the latest turn that has them; None if there is no turn."""
        node, count = self._root, 0
        for message in messages:
            following = node.children.get(message)
            if following is None:
                break
            node, count = following, count + 1
        if node is self._root:
            return 0, next((child.latest for child in node.children.values()), None)
        return count, node.latest

    def has_reply(self, messages: Sequence[Hashable]) -> bool:
        """Return whether a reply to exactly these messages is recorded."""
        node = self._root
        for message in messages:
            following = node.children.get(message)
            if following is None:
                return False
            node = following
        return any(child.turns for child in node.children.values())
