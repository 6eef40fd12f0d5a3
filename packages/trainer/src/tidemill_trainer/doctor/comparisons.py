"""Checks between the nodes of a cluster: pure functions from the facts of all nodes to findings."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidemill_trainer.doctor.facts import NodeFacts
from tidemill_trainer.doctor.finding import Finding

_MAX_CLOCK_OFFSET_S = 1.0
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockReading:
    """The clock of a node, read from another one.

    Attributes:
        sent_s, received_s: time of the reader before and after.
        remote_s: time of the node in between.
    """

    sent_s: float
    received_s: float
    remote_s: float

    def offset(self) -> tuple[float, float]:
        """Return how many seconds the node is ahead, and how far this may be wrong."""
        return self.remote_s - (self.sent_s + self.received_s) / 2, (self.received_s - self.sent_s) / 2


def compare_nodes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Compare software and model of all nodes."""
    return [*compare_versions(nodes), *compare_sources(nodes), *compare_models(nodes)]


def compare_versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Check that all nodes have the versions that most of them have."""
    expected = {name: _majority([node.versions[name] for node in nodes]) for name in nodes[0].versions}
    for node in nodes:
        for name, usual in expected.items():
            if node.versions[name] != usual:
                yield Finding(
                    node=node.name,
                    cause=f"expected {name} {usual} as on {_others(nodes, node)}, found {node.versions[name]}",
                    remedy="install the same environment on each node, and restart Ray there",
                )


def compare_sources(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Check that the sources of tidemill's packages are equal; two checkouts may have the same version."""
    usual = _majority([node.source for node in nodes])
    for node in nodes:
        if node.source != usual:
            yield Finding(
                node=node.name,
                cause=f"the source of tidemill's packages differs from that on {_others(nodes, node)} (hash "
                f"{node.source} instead of {usual})",
                remedy="install the same commit on each node, and restart Ray there",
            )


def compare_models(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Check that all nodes that can read the model have the same files."""
    readable = [node for node in nodes if isinstance(node.model, dict)]
    if not readable:
        return
    texts = [str(sorted(node.model.items())) for node in readable if isinstance(node.model, dict)]
    usual = readable[texts.index(_majority(texts))]
    for node in readable:
        names = differing(usual.model, node.model)
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield Finding(
                node=node.name,
                cause=f"the model differs from that on {usual.name} in {', '.join(names[:_SHOWN])}{more}",
                remedy="copy the same model to each node, or use a shared file system",
            )


def differing(expected: object, found: object) -> list[str]:
    """Return the names of files whose digests differ, or that one of two models lacks."""
    if not isinstance(expected, dict) or not isinstance(found, dict):
        return []
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def compare_clocks(readings: Mapping[str, ClockReading]) -> Iterator[Finding]:
    """Check the offset of the clocks of nodes, as far as the readings are exact enough.

    Args:
        readings: reading of each node, by its name.
    """
    for node, reading in readings.items():
        ahead, error = reading.offset()
        if abs(ahead) - error > _MAX_CLOCK_OFFSET_S:
            yield Finding(
                node=node,
                cause=f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} that of the driver "
                f"(expected at most {_MAX_CLOCK_OFFSET_S:g} s): times in logs do not agree",
                remedy="synchronize it, for example with chrony",
                is_error=False,
            )


def _majority(values: Sequence[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def _others(nodes: Sequence[NodeFacts], node: NodeFacts) -> str:
    others = [other.name for other in nodes if other is not node]
    return others[0] if len(others) == 1 else "most nodes"
