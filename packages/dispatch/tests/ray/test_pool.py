"""Arguments of pools, without a cluster."""

import pytest

pytest.importorskip("ray")
from tidemill_dispatch.ray import RayResourcePool, merge_resource_pool, reservation, split_resource_pool
from tidemill_dispatch.ray.reservation import Reservation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"process_on_nodes": []}, r"must hold a number >= 1 for each of one or more nodes, got \[\]"),
        ({"process_on_nodes": [2, 0]}, r"must hold a number >= 1 .*, got \[2, 0\]"),
        ({"process_on_nodes": [1], "num_cpus_per_worker": -1}, "must be >= 0, got num_cpus_per_worker=-1"),
        ({"process_on_nodes": [1], "num_cpus_per_worker": 0}, "must be > 0, got 0 for both"),
    ],
)
def test_wrong_pool_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RayResourcePool(**arguments)


@pytest.mark.parametrize("processes", [2, 2.0, "2", [2.0], ["2"]])
def test_pool_without_whole_numbers_is_refused(processes):
    with pytest.raises(TypeError, match="processes of each node, such as \\[4, 4\\], got ") as caught:
        RayResourcePool(processes)
    assert str(caught.value).endswith(repr(processes))


def test_wrong_splits_and_merges_are_refused():
    pool = RayResourcePool([4, 2])
    for sizes in (4, 0, [3, 2], [7], [6, 0], []):
        with pytest.raises(ValueError, match="must be sizes >= 1 that add up to the 6 processes"):
            split_resource_pool(pool, sizes)
    parts = split_resource_pool(pool, [1, 2, 3])
    assert [part.world_size for part in parts] == [1, 2, 3]
    assert [part.world_size for part in split_resource_pool(pool, 3)] == [3, 3]
    with pytest.raises(ValueError, match="must not share processes, got 2 in both"):
        merge_resource_pool(pool, parts[1])
    with pytest.raises(ValueError, match="must have the same num_cpus_per_worker, got 1 and 2"):
        merge_resource_pool(pool, RayResourcePool([1], num_cpus_per_worker=2))
    with pytest.raises(ValueError, match=r"=3 with max_colocate_count=2 gives 1\.5 GPUs to each worker"):
        RayResourcePool([1], num_gpus_per_worker=3, max_colocate_count=2)
    with pytest.raises(ValueError, match="max_colocate_count must be >= 1, got 0"):
        RayResourcePool([1], max_colocate_count=0)
    with pytest.raises(
        ValueError, match=r"distinct_nodes=True with max_colocate_count=2 .* ranks of one group on one GPU"
    ):
        RayResourcePool([2, 2], num_gpus_per_worker=1, max_colocate_count=2, distinct_nodes=True)
    RayResourcePool([1, 1], num_gpus_per_worker=1, max_colocate_count=2, distinct_nodes=True)


def test_each_process_of_a_pool_has_its_own_limit_of_groups(monkeypatch):
    monkeypatch.setattr(Reservation, "_reserve", lambda *_, **__: ["slot 0", "slot 1"])
    monkeypatch.setattr(reservation, "remove_placement_groups", lambda _: None)
    pool = RayResourcePool([2], max_colocate_count=2)
    left, right = split_resource_pool(pool, 1)
    left.place("left")
    right.place("right")
    assert pool.place("whole").slots == ("slot 0", "slot 1")
    with pytest.raises(RuntimeError, match=r"used by groups \['right', 'whole'\], and its max_colocate_count is 2"):
        right.place("fourth")
    left.release("left")
    assert left.place("again").slots == ("slot 0",)
