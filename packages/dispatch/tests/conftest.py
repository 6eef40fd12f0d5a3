import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# Examples are small; their duration depends on the load of the machine only.
settings.register_profile("dispatch", deadline=None)
settings.load_profile("dispatch")

_MEMORY = {"object_store_memory": 200 << 20}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster with one node of 3 CPUs, in Ray namespace "tests". The only one of the process."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, **_MEMORY})
    try:
        ray.init(address=cluster.address, namespace="tests", log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
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
        _wait_until_removed(ray, nodes)


def _wait_until_removed(ray: Any, nodes: list[Any]) -> None:
    import time

    ids, deadline_s = {node.node_id for node in nodes}, time.monotonic() + 30
    while any(node["Alive"] and node["NodeID"] in ids for node in ray.nodes()):
        assert time.monotonic() < deadline_s, "nodes were removed, but Ray still lists them as alive after 30 s"
        time.sleep(0.1)
