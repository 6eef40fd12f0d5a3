import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Examples are small; their duration depends on the load of the machine only.
settings.register_profile("dispatch", deadline=None)
settings.load_profile("dispatch")

_CLUSTER = pytest.StashKey[Any]()
_MEMORY = {"object_store_memory": 200 << 20}


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest) -> Any:
    """A Ray cluster with one node of 3 CPUs, in Ray namespace "tests". All tests of this package share it."""
    pytest.importorskip("ray")
    stash = request.session.stash
    if _CLUSTER not in stash:
        stash[_CLUSTER] = _start_cluster()
    return stash[_CLUSTER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _stop_cluster(item.session)  # other packages start their own Ray in this process


def pytest_sessionfinish(session: pytest.Session) -> None:
    _stop_cluster(session)  # also after an interrupt


def _start_cluster() -> Any:
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False, **_MEMORY})
    try:
        ray.init(address=cluster.address, namespace="tests", log_to_driver=False, logging_level="ERROR")
    except BaseException:
        cluster.shutdown()
        raise
    return cluster


def _stop_cluster(session: pytest.Session) -> None:
    if _CLUSTER in session.stash:
        import ray

        cluster = session.stash[_CLUSTER]
        del session.stash[_CLUSTER]
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def two_nodes(ray_cluster: Any) -> Iterator[tuple[str, str]]:
    """Ids of two further nodes of `ray_cluster`: one with 1 GPU, one with 2, and 4 CPUs each.

    The resources are declared, not real. The CPUs of the head node are reserved, so that groups start on these nodes.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    head_cpus = placement_group([{"CPU": 3}], strategy="STRICT_PACK")
    assert head_cpus.wait(30)
    nodes = []
    try:
        nodes += [ray_cluster.add_node(num_cpus=4, num_gpus=num_gpus, **_MEMORY) for num_gpus in (1, 2)]
        ray_cluster.wait_for_nodes()
        yield nodes[0].node_id, nodes[1].node_id
    finally:
        for node in nodes:
            ray_cluster.remove_node(node)
        remove_placement_group(head_cpus)
        ids, deadline_s = {node.node_id for node in nodes}, time.monotonic() + 30
        while any(node["Alive"] and node["NodeID"] in ids for node in ray.nodes()):
            assert time.monotonic() < deadline_s, "Ray still lists removed nodes as alive after 30 s"
            time.sleep(0.1)
