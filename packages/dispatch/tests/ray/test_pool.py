"""Where the processes of groups go: unequal nodes, whole and shared GPUs, split and merged pools."""

import os
import sys
import time
from collections import Counter

import pytest
from tidemill_dispatch import Dispatch, Worker, register

ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402
from tidemill_dispatch.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    merge_resource_pool,
    split_resource_pool,
)

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Placed(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return ray.get_runtime_context().get_node_id(), *ray.get_gpu_ids()

    @register(Dispatch.ONE_TO_ALL)
    def environment(self):
        return [os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]


def start(pool, name="placed"):
    return RayWorkerGroup(pool, RayClassWithInitArgs(Placed), name_prefix=name, timeout_s=60)


def nodes_of(group):
    return [node for node, *_ in group.place()]


def all_gpus_are_free():
    deadline = time.monotonic() + 15
    while ray.available_resources().get("GPU", 0) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    return ray.available_resources()["GPU"] == 3


def test_unequal_nodes_with_whole_gpus(two_nodes):
    _, small, large = two_nodes
    with start(RayResourcePool([1, 2], num_gpus_per_worker=1)) as group:
        assert nodes_of(group) == [small, large, large]  # although the first entry would fit on the large node
        assert sorted(group.place()) == sorted([(small, 0), (large, 0), (large, 1)])
        address = ray.util.get_node_ip_address()
        assert group.environment() == [
            ["0", "3", "0", "1", address],
            ["1", "3", "0", "2", address],
            ["2", "3", "1", "2", address],
        ]
    assert all_gpus_are_free()


def test_nodes_of_one_size_are_in_the_order_of_their_addresses(two_nodes):
    _, small, large = two_nodes
    with start(RayResourcePool([1, 1, 1], num_gpus_per_worker=1)) as group:  # one address here, so by the nodes' ids
        assert nodes_of(group) == sorted([small, large, large])


def test_fractions_share_a_gpu_and_groups_of_one_pool_have_the_same_gpu_at_the_same_rank(two_nodes):
    *_, large = two_nodes
    pool = RayResourcePool([4], num_gpus_per_worker=0.5, max_colocate_count=2)
    with start(pool, "first") as first:
        places = first.place()
        assert set(nodes_of(first)) == {large}
        assert Counter(gpu for _, gpu in places) == {0: 2, 1: 2}
        with start(pool, "second") as second:
            assert second.place() == places
            with pytest.raises(RuntimeError, match=r"used by \['first', 'second'\], and max_colocate_count is 2"):
                start(pool, "third")
        assert ray.available_resources()["GPU"] == 1  # the first still uses the pool
    assert all_gpus_are_free()


def test_pools_are_split_and_merged(two_nodes):
    _, small, large = two_nodes
    pool = RayResourcePool([2, 1], num_gpus_per_worker=1)
    left, right = split_resource_pool(pool, [1, 2])
    assert (left.world_size, right.world_size) == (1, 2)
    with start(left, "left") as a, start(right, "right") as b:
        assert (nodes_of(a), nodes_of(b)) == ([large], [large, small])
        places = a.place() + b.place()
        assert len(set(places)) == 3
        with pytest.raises(RuntimeError, match=r"used by \['left', 'right'\], and max_colocate_count is 1"):
            start(pool, "whole")
        a.shutdown()
        with start(left, "again") as again:  # the right half holds the reservation
            assert again.place() == places[:1]
    assert all_gpus_are_free()

    merged = merge_resource_pool(right, left)
    assert merged.world_size == 3
    with start(merged, "merged") as group:
        assert nodes_of(group) == [large, small, large]
    both = merge_resource_pool(RayResourcePool([1], num_gpus_per_worker=1), RayResourcePool([2], num_gpus_per_worker=1))
    with start(both, "both") as group:  # the larger one is reserved first
        assert nodes_of(group) == [small, large, large]
    assert all_gpus_are_free()


def test_wrong_splits_and_merges():
    pool = RayResourcePool([4, 2])
    for sizes in (4, 0, [3, 2], [7], [6, 0], []):
        with pytest.raises(ValueError, match="must be 1 or more and add up to 6"):
            split_resource_pool(pool, sizes)
    parts = split_resource_pool(pool, [1, 2, 3])
    assert [part.world_size for part in parts] == [1, 2, 3]
    assert [part.world_size for part in split_resource_pool(pool, 3)] == [3, 3]
    with pytest.raises(ValueError, match="the pools have 2 processes in common"):
        merge_resource_pool(pool, parts[1])
    with pytest.raises(ValueError, match="must have the same num_cpus_per_worker, got 1 and 2"):
        merge_resource_pool(pool, RayResourcePool([1], num_cpus_per_worker=2))
    with pytest.raises(ValueError, match=r"3 GPUs for 2 groups are 1\.5 for each worker"):
        RayResourcePool([1], num_gpus_per_worker=3, max_colocate_count=2)
    with pytest.raises(ValueError, match="max_colocate_count must be at least 1, got 0"):
        RayResourcePool([1], max_colocate_count=0)
