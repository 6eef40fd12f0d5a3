import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dispatch import MeshLayout, Worker
from tidemill_dispatch.mesh import MeshEntry


def entries(*pairs):
    return [None if pair is None else MeshEntry(dp_rank=pair[0], is_collect=pair[1]) for pair in pairs]


def test_layout_is_in_dp_order_for_any_rank_order():
    layout = MeshLayout.from_entries("actor", entries((1, True), (0, False), (1, False), (0, True)))
    assert layout.dp_size == 2
    assert layout.dp_ranks == (1, 0, 1, 0)
    assert layout.collect_ranks == (3, 0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (entries((0, True), None, (1, True), None), r"mesh 'actor': ranks \[1, 3\] of 4 did not register it"),
        (entries((0, True), (2, True)), r"mesh 'actor': no rank registered dp_rank 1 \(dp_size is 3\)"),
        (
            entries((0, True), (0, True)),
            r"dp_rank 0 \(ranks \[0, 1\]\) has collect ranks \[0, 1\], expected exactly one",
        ),
        (entries((0, True), (1, False)), r"dp_rank 1 \(ranks \[1\]\) has collect ranks \[\], expected exactly one"),
        (
            [
                MeshEntry(dp_rank=0, is_collect=True, dp_size=2),
                MeshEntry(dp_rank=1, is_collect=True, dp_size=2),
                *entries((5, True), (2, False)),
            ],
            "mesh 'actor': rank 2 has dp_rank 5, expected less than dp_size 2; rank 3 has dp_rank 2, exp",
        ),
        (entries((0, False), (2, True)), r"dp_rank 0 .* expected exactly one rank; no rank registered dp_rank 1"),
    ],
)
def test_invalid_mesh_names_the_ranks(table, message):
    with pytest.raises(ValueError, match=message):
        MeshLayout.from_entries("actor", table)


class FakeDeviceMesh:
    def __init__(self, names, shape, coordinate):
        self.mesh_dim_names = names
        self.shape = shape
        self._coordinate = coordinate

    def get_coordinate(self):
        return self._coordinate


def place(names, shape, coordinate, data_axes, collect_at=None):
    worker = Worker()
    worker.register_mesh("m", FakeDeviceMesh(names, shape, coordinate), data_axes, collect_at=collect_at)
    return worker.registered_meshes()["m"]


@given(data=st.data(), shape=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_every_device_mesh_gives_a_valid_layout(data, shape):
    names = ("a", "b", "c", "d")[: len(shape)]
    data_axes = data.draw(st.lists(st.sampled_from(names), unique=True))
    others = [axis for axis in names if axis not in data_axes]
    collect_at = {axis: data.draw(st.sampled_from([0, -1])) for axis in others}
    coordinates = list(itertools.product(*map(range, shape)))
    layout = MeshLayout.from_entries("m", [place(names, tuple(shape), c, data_axes, collect_at) for c in coordinates])
    sizes = dict(zip(names, shape, strict=True))
    assert layout.dp_size == math.prod(sizes[axis] for axis in data_axes)
    for dp_rank, rank in enumerate(layout.collect_ranks):
        at = dict(zip(names, coordinates[rank], strict=True))
        assert layout.dp_ranks[rank] == dp_rank
        assert all(at[axis] == collect_at[axis] % sizes[axis] for axis in others)


def test_data_axes_are_row_major_in_the_order_given():
    assert place(("x", "y"), (2, 3), (1, 2), ["x", "y"]).dp_rank == 5
    assert place(("x", "y"), (2, 3), (1, 2), ["y", "x"]).dp_rank == 5
    assert place(("x", "y"), (2, 3), (1, 0), ["x", "y"]).dp_rank == 3
    assert place(("x", "y"), (2, 3), (1, 0), ["y", "x"]).dp_rank == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("dp", "tp"), (2, 2), (0, 0), ["pp"]), r"no axes \['pp'\]; its axes are \['dp', 'tp'\]"),
        ((None, (2, 2), (0, 0), ["dp"]), r"no axes \['dp'\]; its axes are \[\]"),
        ((("dp", "tp"), (2, 2), None, ["dp"]), "this rank is outside the device mesh of shape"),
        ((("dp", "tp"), (2, 2), (0, 0), ["dp", "dp"]), r"each axis must be named once .* data_axes \['dp', 'dp'\]"),
        ((("dp", "tp"), (2, 2), (0, 0), ["dp"], {"dp": 0}), r"each axis must be named once .* collect_at {'dp': 0}"),
        ((("dp", "tp"), (2, 2), (0, 0), ["dp"], {"tp": 2}), r"out of range on axes \['tp'\]"),
    ],
)
def test_wrong_device_mesh_axes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        place(*arguments)


def test_layout_of_real_torch_device_mesh():
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    table = []
    for rank in range(8):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            worker = Worker()
            worker.register_mesh("actor", mesh, ["dp"], collect_at={"pp": -1})
            table.append(worker.registered_meshes()["actor"])
        finally:
            dist.destroy_process_group()
    layout = MeshLayout.from_entries("actor", table)
    assert layout.dp_ranks == (0, 0, 1, 1, 0, 0, 1, 1)
    assert layout.collect_ranks == (4, 6)


def test_meshes_belong_to_the_worker_instance():
    first, second = Worker(), Worker()
    first.register_dispatch_collect_info("actor", 0, True)
    second.register_dispatch_collect_info("actor", 1, False)
    second.register_dispatch_collect_info("critic", 0, True)
    assert first.registered_meshes() == {"actor": MeshEntry(dp_rank=0, is_collect=True)}
    assert second.registered_meshes()["actor"] == MeshEntry(dp_rank=1, is_collect=False)


def test_subclass_works_without_super_init(monkeypatch):
    class Mine(Worker):
        def __init__(self, value):
            self.value = value

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    worker = Mine(7)
    worker.register_dispatch_collect_info("m", 0, True)
    assert (worker.rank, worker.world_size, worker.value) == (3, 4, 7)


def test_mesh_registered_twice_with_other_values_is_refused():
    worker = Worker()
    worker.register_dispatch_collect_info("actor", 1, True)
    worker.register_dispatch_collect_info("actor", 1, True)
    with pytest.raises(ValueError, match="mesh 'actor' is already registered on rank 0 as"):
        worker.register_dispatch_collect_info("actor", 0, True)
    with pytest.raises(ValueError, match="dp_rank must be >= 0, got -1"):
        worker.register_dispatch_collect_info("critic", -1, True)


def test_ranks_must_register_the_same_dp_size():
    entries = [MeshEntry(dp_rank=0, is_collect=True, dp_size=2), MeshEntry(dp_rank=1, is_collect=True, dp_size=2)]
    assert MeshLayout.from_entries("m", entries).dp_size == 2
    odd = [entries[0], MeshEntry(dp_rank=1, is_collect=True, dp_size=3)]
    with pytest.raises(ValueError, match=r"mesh 'm': all ranks must .* same dp_size, got by rank {0: 2, 1: 3}"):
        MeshLayout.from_entries("m", odd)
    with pytest.raises(ValueError, match=r"no rank registered dp_rank 1 \(dp_size is 2\)"):
        MeshLayout.from_entries("m", entries[:1])  # noticed because of dp_size


def test_dp_rank_beyond_dp_size_and_data_axes_as_string_are_refused():
    with pytest.raises(ValueError, match="dp_rank must be >= 0 and < dp_size 2, got 2 on rank 0"):
        Worker().register_dispatch_collect_info("m", 2, True, dp_size=2)
    with pytest.raises(TypeError, match=r"data_axes must be a list of axis names, got 'dp'"):
        place(("dp", "tp"), (2, 2), (0, 0), "dp")
