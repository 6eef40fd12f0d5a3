import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Examples are small; how long one takes says only how busy the machine is.
settings.register_profile("dispatch", deadline=None)
settings.load_profile("dispatch")


class Clusters:
    """Ray in this process: one cluster at a time, which stays for the next module if that asks for the same one."""

    def __init__(self) -> None:
        self._kind = ""
        self._running: Any = None
        self._end: Callable[[], None] = lambda: None

    def get(self, kind: str, start: Callable[[], tuple[Any, Callable[[], None]]]) -> Any:
        if kind != self._kind:
            self.end()
            self._running, self._end = start()
            self._kind = kind
        return self._running

    def end(self) -> None:
        end, self._end, self._kind = self._end, lambda: None, ""
        end()


_CLUSTERS = pytest.StashKey[Clusters]()


def _clusters_of(session: pytest.Session) -> Clusters:
    return session.stash.setdefault(_CLUSTERS, Clusters())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield  # what the tests have started on the cluster ends first
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        _clusters_of(item.session).end()


def pytest_sessionfinish(session: pytest.Session) -> None:
    _clusters_of(session).end()  # also where the session was cut short


@pytest.fixture(scope="session")
def clusters(request: pytest.FixtureRequest) -> Clusters:
    pytest.importorskip("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return _clusters_of(request.session)


@pytest.fixture(scope="module")
def cluster(clusters: Clusters) -> None:
    """A local Ray cluster of 3 CPUs; groups of several sizes fit into it one after another."""
    clusters.get("local", _start_local)


@pytest.fixture(scope="module")
def two_nodes(clusters: Clusters) -> tuple[Any, str, str]:
    """A Ray cluster of real nodes on this machine: the cluster, the ids of a node with 1 GPU and of one with 2.

    The GPUs are declared, not there; each node has 4 CPUs, as declared. The driver is on a third node with none.
    """
    return clusters.get("two nodes", _start_two_nodes)


def _start_local() -> tuple[None, Callable[[], None]]:
    import ray

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR", namespace="tests")
    return None, ray.shutdown


def _start_two_nodes() -> tuple[tuple[Any, str, str], Callable[[], None]]:
    import ray
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})

    def end() -> None:
        ray.shutdown()
        cluster.shutdown()

    try:
        small = cluster.add_node(num_cpus=4, num_gpus=1, **memory)
        large = cluster.add_node(num_cpus=4, num_gpus=2, **memory)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes()
    except BaseException:
        end()
        raise
    return (cluster, small.node_id, large.node_id), end
