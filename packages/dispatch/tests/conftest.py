import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# Examples are small; how long one takes says only how busy the machine is.
settings.register_profile("dispatch", deadline=None)
settings.load_profile("dispatch")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One local Ray cluster for the tests of a module; groups of several sizes fit into it one after another."""
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[tuple[Any, str, str]]:
    """A Ray cluster of real nodes on this machine: the cluster, the ids of a node with 1 GPU and of one with 2.

    The GPUs are declared, not there; each node has 4 CPUs, as declared. The driver is on a third node with none.
    """
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    try:
        small = cluster.add_node(num_cpus=4, num_gpus=1, **memory)
        large = cluster.add_node(num_cpus=4, num_gpus=2, **memory)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes()
        yield cluster, small.node_id, large.node_id
    finally:
        ray.shutdown()
        cluster.shutdown()
