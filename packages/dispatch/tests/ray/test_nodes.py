"""Calls over the nodes of a real Ray cluster: what goes over, and what happens when a node is lost."""

import sys
import time

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
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402

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
    def node(self):
        return ray.get_runtime_context().get_node_id()

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


def held_on(node, refs):
    """Bytes of these objects that the object store of a node holds."""
    found = ray.experimental.get_object_locations(refs)
    return sum(entry["object_size"] for entry in found.values() if node in entry["node_ids"])


def test_a_process_group_over_two_nodes(two_nodes):
    _, small, large = two_nodes
    with start(RayResourcePool([1, 1], num_cpus_per_worker=3)) as group:
        assert set(group.node()) == {small, large}
        assert group.sum_of_ranks() == [3.0, 3.0]


def test_a_node_fetches_only_the_rows_it_needs(two_nodes):
    _, small, large = two_nodes
    on_large = RayResourcePool([3], num_gpus_per_worker=0.5)
    on_small = RayResourcePool([2])
    with start(on_large, "readers") as readers, start(on_small, "makers") as makers:
        assert (set(readers.node()), set(makers.node())) == ({large}, {small})
        made = makers.make(ListBatch(list(range(6))))
        parts = list(made.call.values.values())
        # Reader 0 takes two of the three rows of part 0, reader 1 one of each part, reader 2 two of part 1.
        assert readers.read(made).get().items == [(row // 2, row, ROW_BYTES) for row in range(6)]
        assert held_on(small, parts) >= 6 * ROW_BYTES
        assert held_on(large, parts) == 0
        # Over the mesh of two shards each reader needs a whole part: it goes over as it is.
        assert len(readers.copy_pairs(made).get()) == 6
        assert held_on(large, parts) >= 6 * ROW_BYTES


def test_rows_between_dp_groups_whose_ranks_are_on_both_nodes(two_nodes):
    _, small, large = two_nodes
    with start(RayResourcePool([2, 2], num_cpus_per_worker=1.5)) as group:
        assert sorted(group.node()) == sorted([small] * 2 + [large] * 2)
        rows = list(range(5))
        copied = group.copy_pairs(group.make(ListBatch(rows)))  # 4 shards to 2
        assert copied.get().items == [bytes([row]) * ROW_BYTES for row in rows]
        padded = group.read_padded(group.copy_pairs(copied))  # 2 shards to 4 of two rows each
        assert padded.get().items == [(0, 2), (0, 2), (1, 2), (2, 2), (3, 2)]
        one = group.read_padded(group.copy_pairs(group.make(ListBatch([7]))))  # three shards are all padding
        assert one.get().items == [(0, 1)]
        assert group.read(group.copy_pairs(group.make(ListBatch([])))).get().items == []


def test_a_node_that_is_lost_is_a_death_of_its_ranks(two_nodes):
    cluster, *_ = two_nodes
    extra = cluster.add_node(num_cpus=1, num_gpus=8, object_store_memory=200 << 20)
    with start(RayResourcePool([1], num_gpus_per_worker=8)) as group:
        future = group.hang()
        assert not future.done()
        started = time.monotonic()
        cluster.remove_node(extra, allow_graceful=False)
        with pytest.raises(WorkerDiedError, match=r"rank 0 of group 'nodes' .* died during 'hang'"):
            future.get(timeout_s=60)
        assert time.monotonic() - started < 10
