"""What a check found on a node."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A problem of a node.

    Attributes:
        node: name of the node; several for a problem between them.
        cause: what is wrong: expected and found.
        remedy: what to do, as an imperative.
        is_error: whether a run would fail or give wrong results; otherwise it would be slow or fragile.
    """

    node: str
    cause: str
    remedy: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.node}: {self.cause}; {self.remedy}"
