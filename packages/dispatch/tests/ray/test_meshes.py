"""Meshes of random shape and rank order on eight actors: each rank receives its shard, results are in order."""

import itertools
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tidemill_dispatch import (
    Dispatch,
    ListBatch,
    Padding,
    Shard,
    Worker,
    register,
    split_over,
)
from tidemill_dispatch.method import MethodSpec

pytest.importorskip("ray")
from ray import cloudpickle
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])
NUM_RANKS = 8
AXES = ("dp", "tp", "pp", "sp")


class Coordinates:
    """The members of a DeviceMesh that are read, for one rank."""

    def __init__(self, names, shape, coordinate):
        self.mesh_dim_names = names
        self.shape = shape
        self._coordinate = coordinate

    def get_coordinate(self):
        return self._coordinate


def pad(batch, divisor):
    count = -len(batch) % divisor
    return ListBatch([*batch.items, *["padding"] * count]), count


def unpad(batch, count):
    return ListBatch(batch.items[: len(batch) - count])


PADDING = Padding(pad=pad, unpad=unpad)


class MeshWorker(Worker):
    @register(Dispatch.ALL_TO_ALL)
    def place(self, name, coordinate, names, shape, data_axes, collect_at):
        self.register_mesh(name, Coordinates(names, shape, coordinate), data_axes, collect_at=collect_at)

    @register(Dispatch.ONE_TO_ALL)
    def seen(self):
        return self.rows

    # Called through `over`, whose mode names the mesh. The workers apply the padding of the registration.
    @register(split_over("any"))
    def echo_unequal(self, batch, *, ids):
        return self.echo(batch, ids=ids)

    @register(split_over("any", padding=PADDING))
    def echo_padded(self, batch, *, ids):
        return self.echo(batch, ids=ids)

    def echo(self, batch, *, ids):
        """Collect ranks return the batch, others a value that would fail the test."""
        self.rows = batch.items
        assert len(ids) == len(batch) or "padding" in batch.items
        mesh = self.registered_meshes()[self.mesh_in_use]
        return ListBatch(list(batch.items)) if mesh.is_collect else "not collected"

    @register(Dispatch.ONE_TO_ALL)
    def use(self, name):
        self.mesh_in_use = name


def over(group, mesh, method, padding, batch, **kwargs):
    """Call `method` over a mesh that is not known at registration."""
    mode = split_over(mesh, padding=padding)
    spec = MethodSpec(name=method, mode=mode, blocking=True, timeout_s=None)
    return group.call(spec, (batch,), kwargs).get()


@pytest.fixture(scope="module")
def group(ray_cluster):
    pool = RayResourcePool(process_on_nodes=[NUM_RANKS], num_cpus_per_worker=0.25)
    with RayWorkerGroup(pool, RayClassWithInitArgs(MeshWorker), name_prefix="mesh", timeout_s=60) as group:
        yield group


@st.composite
def meshes(draw):
    """Eight ranks as dp x tp x pp x sp in any order of axes and any order of ranks, any of them data axes."""
    shapes = [(1, 1, 1, 8), (1, 1, 2, 4), (1, 2, 2, 2)]
    sizes = draw(st.permutations(draw(st.sampled_from(shapes))).map(tuple))
    names = tuple(draw(st.permutations(AXES)))
    data_axes = draw(st.lists(st.sampled_from(names), unique=True))
    collect_at = {axis: draw(st.sampled_from([0, -1])) for axis in names if axis not in data_axes}
    coordinates = draw(st.permutations(list(itertools.product(*map(range, sizes)))))
    return names, sizes, data_axes, collect_at, coordinates


_counter = itertools.count()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mesh=meshes(), rows=st.lists(st.integers(), max_size=20), padded=st.booleans())
def test_dispatch_then_collect_is_identity_and_each_rank_receives_its_shard(group, mesh, rows, padded):
    names, sizes, data_axes, collect_at, coordinates = mesh
    name = f"random-{next(_counter)}"
    everywhere = [[value] * NUM_RANKS for value in (names, sizes, data_axes, collect_at)]
    group.place([name] * NUM_RANKS, coordinates, *everywhere)
    group.use(name)

    axis = {axis: (names.index(axis), sizes[names.index(axis)]) for axis in names}
    dp_size, dp_rank = 1, [0] * NUM_RANKS
    for data_axis in data_axes:
        at, size = axis[data_axis]
        dp_size *= size
        dp_rank = [before * size + coordinate[at] for before, coordinate in zip(dp_rank, coordinates, strict=True)]
    assert group.dp_size(name) == dp_size

    ids = Shard(rows) if not padded or len(rows) % dp_size == 0 else ListBatch(rows)
    method, padding = ("echo_padded", PADDING) if padded else ("echo_unequal", None)
    assert over(group, name, method, padding, ListBatch(rows), ids=ids) == ListBatch(rows)

    shards = [part.items for part in ListBatch(rows).chunk(dp_size)]
    seen = group.seen()
    assert [[row for row in rows if row != "padding"] for rows in seen] == [shards[at] for at in dp_rank]
    if padded:
        assert len({len(rows) for rows in seen}) == 1
