"""Questions to all nodes of a cluster, and what follows from their answers."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidemill_trainer.doctor.comparisons import ClockReading, compare_clocks, compare_nodes
from tidemill_trainer.doctor.facts import NodeFacts
from tidemill_trainer.doctor.finding import Finding
from tidemill_trainer.doctor.links import Link, check_links, rounds
from tidemill_trainer.doctor.node_checks import check_address, check_model, check_node
from tidemill_trainer.doctor.probe import Probe
from tidemill_trainer.doctor.shared_folder import not_shared, shared_file

_ANSWER_S = 60.0


class Survey:
    """A process on each node that can run processes; the node of the driver comes first. Use it with `with`.

    Args:
        run_dir: parent folder of the runs.

    Attributes:
        findings: problems so far. A node that does not answer is one, and is not asked again.
        facts: facts of the nodes that answered, by Ray's id of the node.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._probes: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.facts: dict[str, NodeFacts] = {}

    def __enter__(self) -> Self:
        here = ray.get_runtime_context().get_node_id()
        probe = ray.remote(num_cpus=0, max_restarts=0)(Probe)
        for node in sorted(ray.nodes(), key=lambda each: each["NodeID"] != here):
            if not node["Alive"] or not {"CPU", "GPU"} & node["Resources"].keys():
                continue
            node_id, address = node["NodeID"], node["NodeManagerAddress"]
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._names[node_id] = f"{node['NodeManagerHostname']} ({address})"
            self._probes[node_id] = probe.options(scheduling_strategy=strategy).remote(address, self._run_dir)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for probe in self._probes.values():
            ray.kill(probe)

    def inspect(self, model: str | None, checkpoint_dir: str | None = None, *, has_leftovers: bool = False) -> None:
        """Check each node, and compare software, model, clocks and the folders of runs and checkpoints between them.

        Args:
            model: folder of the model; None without one.
            checkpoint_dir: folder or URL of the checkpoints; None: the folder of the runs.
            has_leftovers: also report what dead runs left.
        """
        self.facts = self._ask(lambda probe: probe.facts.remote(model, has_leftovers=has_leftovers))
        nodes = list(self.facts.values())
        for node in nodes:
            self.findings += [*check_node(node), *check_model(node)]
        if checkpoint_dir is not None:
            self._check_shared("trainer.checkpoint_dir", checkpoint_dir)
        self._check_shared("trainer.run_dir", self._run_dir)
        if len(nodes) < 2:
            return
        for node in nodes:
            self.findings += check_address(node)
        self.findings += compare_nodes(nodes)
        self.findings += compare_clocks(self._clocks())

    def clean(self) -> dict[str, list[str]]:
        """Remove what dead runs left on each node; return what was removed, by the name of the node."""
        return {self._names[node]: removed for node, removed in self._ask(lambda probe: probe.clean.remote()).items()}

    def check_connections(self) -> None:
        """Check that each node reaches each other one by TCP, at a port that the system selects."""
        ports = self._ask(lambda probe: probe.listen.remote())
        asked = {node: [other for other in ports if other != node] for node in ports}
        where = {node: (self.facts[node].address, port) for node, port in ports.items()}
        answers = self._answers(
            {node: self._probes[node].connect.remote([where[other] for other in asked[node]]) for node in ports}
        )
        for node, errors in answers.items():
            for other, error in zip(asked[node], errors, strict=True):
                if error:
                    self.findings.append(
                        Finding(
                            node=f"{self._names[node]} to {self._names[other]}",
                            cause=f"cannot connect to {where[other][0]}:{where[other][1]}: {error}",
                            remedy="permit TCP between the nodes at all ports from 1024, in both directions",
                        )
                    )

    def measure_links(self) -> dict[str, Link]:
        """Measure an all-reduce between each pair of nodes, and check them; return the links by the names of nodes."""
        links: dict[str, Link] = {}
        self._ask(lambda probe: probe.prepare_links.remote())
        for pairs in rounds(list(self.facts)):
            present = [(a, b) for a, b in pairs if a in self.facts and b in self.facts]
            ports = self._answers({a: self._probes[a].listen.remote() for a, _ in present})
            refs = {}
            for a, b in present:
                if a in ports:
                    where = self.facts[a].address, ports[a]
                    refs |= {a: self._probes[a].measure_link.remote(0, *where)}
                    refs |= {b: self._probes[b].measure_link.remote(1, *where)}
            answers = self._answers(refs)
            for a, b in present:
                if a in answers and b in answers:
                    name, measured = f"{self._names[a]} to {self._names[b]}", (answers[a], answers[b])
                    links[name] = next((link for link in measured if link.error), measured[0])
        self.findings += check_links(links)
        return links

    def measure_gpus(self) -> dict[str, Link]:
        """Measure an all-reduce between each pair of GPUs of each node; see `measure_links`."""
        answers = self._ask(lambda probe: probe.measure_gpus.remote())
        links = {f"{self._names[node]}, {pair}": link for node, of in answers.items() for pair, link in of.items()}
        self.findings += check_links(links, "GPUs")
        return links

    def _clocks(self) -> dict[str, ClockReading]:
        """Read the clocks one by one; the processes have answered before, so an answer takes milliseconds."""
        readings = {}
        for node in list(self.facts):
            sent = time.time()
            answer = self._answers({node: self._probes[node].clock.remote()})
            if node in answer:
                readings[self._names[node]] = ClockReading(sent_s=sent, received_s=time.time(), remote_s=answer[node])
        return readings

    def _check_shared(self, key: str, folder: str) -> None:
        """Check that all nodes read what the driver writes to the folder or URL of a configuration key."""
        try:
            with shared_file(folder) as file:
                errors = self._ask(lambda probe: probe.check.remote(file))
        except OSError as error:
            errors = {ray.get_runtime_context().get_node_id(): str(error)}
        found = {self._names.get(node, "the driver"): error for node, error in errors.items() if error}
        self.findings += [not_shared(key, node, error) for node, error in found.items()]

    def _ask(self, question: Callable[[Any], Any]) -> dict[str, Any]:
        return self._answers({node: question(probe) for node, probe in self._probes.items()})

    def _answers(self, refs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answers by node; a node without one becomes a finding, and is not asked again."""
        answers = {}
        ready: Sequence[Any] = []
        if refs:
            ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_ANSWER_S)
        for node, ref in refs.items():
            try:
                if ref in ready:
                    answers[node] = ray.get(ref)
                    continue
                cause, remedy = (
                    f"a process on it did not answer within {_ANSWER_S:g} s",
                    "check its load and Ray's logs",
                )
            except RayError as error:
                cause = f"a process on it failed: {_first_line(error)}"
                remedy = "install tidemill there in the environment in which Ray was started, and see Ray's logs"
            self.findings.append(
                Finding(node=self._names[node], cause=cause, remedy=f"{remedy}, or remove the node from the cluster")
            )
            ray.kill(self._probes.pop(node))
            self.facts.pop(node, None)
        return answers


def _first_line(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    return str(error if cause is None else cause).strip().splitlines()[-1]
