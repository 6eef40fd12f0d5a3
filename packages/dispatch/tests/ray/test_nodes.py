"""Groups on several nodes: placement in pools, rows between nodes, and the loss of a node."""

import os
import sys
import time
from collections import Counter

import pytest
from tidemill_dispatch import (
    Dispatch,
    ListBatch,
    Padding,
    Worker,
    WorkerDiedError,
    register,
    split_over,
)

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
ROW_BYTES = 200_000  # more than Ray sends inside its messages


def pad(batch, divisor):
    count = -len(batch) % divisor
    return ListBatch([*batch.items, *[b""] * count]), count


def unpad(batch, count):
    return ListBatch(batch.items[: len(batch) - count])


_each = split_over("each")
_pairs = split_over("pairs")
_padded = split_over("each", padding=Padding(pad=pad, unpad=unpad))


class NodeWorker(Worker):
    def __init__(self):
        self.register_dispatch_collect_info("each", self.rank, True)
        self.register_dispatch_collect_info("pairs", self.rank % 2, self.rank < 2)

    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return ray.get_runtime_context().get_node_id(), *ray.get_gpu_ids()

    @register(Dispatch.ONE_TO_ALL)
    def environment(self):
        return [os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]

    @register(Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        value = torch.tensor(float(1 + self.rank))
        dist.all_reduce(value)
        return value.item()

    @register(_each, blocking=False)
    def make(self, batch):
        return ListBatch([bytes([row]) * ROW_BYTES for row in batch])

    @register(_each, blocking=False)
    def read(self, batch):
        return ListBatch([(self.rank, row[0], len(row)) for row in batch])

    @register(_padded, blocking=False)
    def read_padded(self, batch):
        return ListBatch([(self.rank, len(batch)) for _ in batch])

    @register(_pairs, blocking=False)
    def copy_pairs(self, batch):
        return ListBatch([bytes(row) for row in batch])

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def hang(self):
        time.sleep(1000)


def start(pool, name="nodes"):
    return RayWorkerGroup(pool, RayClassWithInitArgs(NodeWorker), name_prefix=name, timeout_s=60)


def nodes_of(group):
    return [node for node, *_ in group.place()]


def all_gpus_are_free():
    deadline = time.monotonic() + 15
    while ray.available_resources().get("GPU", 0) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    return ray.available_resources()["GPU"] == 3


def held_on(node, refs):
    """Return the bytes of these objects in the object store of a node."""
    found = ray.experimental.get_object_locations(refs)
    return sum(entry["object_size"] for entry in found.values() if node in entry["node_ids"])


def test_unequal_nodes_with_whole_gpus(two_nodes):
    small, large = two_nodes
    with start(RayResourcePool([1, 2], num_gpus_per_worker=1)) as group:
        assert nodes_of(group) == [small, large, large]  # although the first entry also fits the large node
        assert sorted(group.place()) == sorted([(small, 0), (large, 0), (large, 1)])
        address = ray.util.get_node_ip_address()
        assert group.environment() == [
            ["0", "3", "0", "1", address],
            ["1", "3", "0", "2", address],
            ["2", "3", "1", "2", address],
        ]
    assert all_gpus_are_free()


def test_nodes_of_one_size_are_in_address_order(two_nodes):
    small, large = two_nodes
    with start(RayResourcePool([1, 1, 1], num_gpus_per_worker=1)) as group:  # one address here, so by node id
        assert nodes_of(group) == sorted([small, large, large])


def test_entries_on_distinct_nodes_do_not_share_one_that_has_room(two_nodes):
    small, large = two_nodes
    with start(RayResourcePool([2, 2], distinct_nodes=True)) as group:
        nodes = nodes_of(group)
        assert (set(nodes), nodes[0], nodes[2]) == ({small, large}, nodes[1], nodes[3])
        assert [host.node_id for host in group.hosts()] == nodes
        assert [each[2] for each in group.environment()] == ["0", "1", "0", "1"]
    pool = RayResourcePool([1] * 4, distinct_nodes=True, placement_timeout_s=1)
    with pytest.raises(RuntimeError, match=r"requires 1 \+ 1 \+ 1 \+ 1 processes \(on 4 distinct nodes\)"):
        start(pool)


def test_groups_of_one_pool_share_a_gpu_at_the_same_rank(two_nodes):
    _, large = two_nodes
    pool = RayResourcePool([4], num_gpus_per_worker=0.5, max_colocate_count=2)
    with start(pool, "first") as first:
        places = first.place()
        assert set(nodes_of(first)) == {large}
        assert Counter(gpu for _, gpu in places) == {0: 2, 1: 2}
        with start(pool, "second") as second:
            assert second.place() == places
            with pytest.raises(RuntimeError, match=r"groups \['first', 'second'\], and its max_colocate_count is 2"):
                start(pool, "third")
        assert ray.available_resources()["GPU"] == 1  # the first still uses the pool
    assert all_gpus_are_free()


def test_groups_in_split_and_merged_pools(two_nodes):
    small, large = two_nodes
    pool = RayResourcePool([2, 1], num_gpus_per_worker=1)
    left, right = split_resource_pool(pool, [1, 2])
    assert (left.world_size, right.world_size) == (1, 2)
    with start(left, "left") as a, start(right, "right") as b:
        assert (nodes_of(a), nodes_of(b)) == ([large], [large, small])
        places = a.place() + b.place()
        assert len(set(places)) == 3
        with pytest.raises(RuntimeError, match=r"used by groups \['left', 'right'\], and its max_colocate_count is 1"):
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


def test_process_group_over_two_nodes(two_nodes):
    small, large = two_nodes
    with start(RayResourcePool([1, 1], num_cpus_per_worker=3)) as group:
        assert set(nodes_of(group)) == {small, large}
        assert group.sum_of_ranks() == [3.0, 3.0]


def test_node_fetches_only_the_rows_it_needs(two_nodes):
    small, large = two_nodes
    on_large = RayResourcePool([3], num_gpus_per_worker=0.5)
    on_small = RayResourcePool([2])
    with start(on_large, "readers") as readers, start(on_small, "makers") as makers:
        assert (set(nodes_of(readers)), set(nodes_of(makers))) == ({large}, {small})
        made = makers.make(ListBatch(list(range(6))))
        parts = list(made.call.values.values())
        # Reader 0 takes two of the three rows of part 0, reader 1 one of each part, reader 2 two of part 1.
        assert readers.read(made).get().items == [(row // 2, row, ROW_BYTES) for row in range(6)]
        assert held_on(small, parts) >= 6 * ROW_BYTES
        assert held_on(large, parts) == 0
        # Over the mesh of two shards each reader needs a whole part, which is sent uncut.
        assert len(readers.copy_pairs(made).get()) == 6
        assert held_on(large, parts) >= 6 * ROW_BYTES


def test_rows_between_dp_groups_on_both_nodes(two_nodes):
    small, large = two_nodes
    with start(RayResourcePool([2, 2], num_cpus_per_worker=1.5)) as group:
        assert sorted(nodes_of(group)) == sorted([small] * 2 + [large] * 2)
        rows = list(range(5))
        copied = group.copy_pairs(group.make(ListBatch(rows)))  # 4 shards to 2
        assert copied.get().items == [bytes([row]) * ROW_BYTES for row in rows]
        padded = group.read_padded(group.copy_pairs(copied))  # 2 shards to 4 of two rows each
        assert padded.get().items == [(0, 2), (0, 2), (1, 2), (2, 2), (3, 2)]
        one = group.read_padded(group.copy_pairs(group.make(ListBatch([7]))))  # three shards are all padding
        assert one.get().items == [(0, 1)]
        assert group.read(group.copy_pairs(group.make(ListBatch([])))).get().items == []


def test_loss_of_a_node_is_the_death_of_its_ranks(ray_cluster, two_nodes):
    extra = ray_cluster.add_node(num_cpus=1, num_gpus=8, object_store_memory=200 << 20)
    with start(RayResourcePool([1], num_gpus_per_worker=8)) as group:
        future = group.hang()
        assert not future.done()
        ray_cluster.remove_node(extra, allow_graceful=False)
        with pytest.raises(WorkerDiedError, match=r"rank 0 of group 'nodes' .* died during 'hang'"):
            future.get(timeout_s=60)
