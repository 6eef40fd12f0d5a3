import pytest
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dispatch import (
    Dispatch,
    DispatchMode,
    Execute,
    ListBatch,
    MeshLayout,
    Replicate,
    Shard,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from tidemill_dispatch.mesh import MeshEntry
from tidemill_dispatch.registry import get_dispatch_mode, registered_methods


class Group:
    """What a mode needs of a group, and a run of a call over it without processes."""

    def __init__(self, world_size, layout=None):
        self.world_size = world_size
        self._layout = layout

    def mesh(self, name):
        assert self._layout is not None
        assert name == "m"
        return self._layout

    def run(self, mode, fn, *args, **kwargs):
        calls = mode.dispatch_fn(self, args, kwargs)
        assert len(calls) == self.world_size
        return mode.collect_fn(
            self, [fn(rank, *calls[rank][0], **calls[rank][1]) for rank in mode.result_ranks_fn(self)]
        )


@st.composite
def meshes(draw):
    """A mesh of dp x tp x pp ranks in any rank order, with any one collect rank per dp_rank."""
    dp, tp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    places = [(dp_rank, other) for dp_rank in range(dp) for other in range(tp * pp)]
    places = draw(st.permutations(places))
    collect = [draw(st.integers(0, tp * pp - 1)) for _ in range(dp)]
    entries = [MeshEntry(dp_rank=d, is_collect=other == collect[d]) for d, other in places]
    return MeshLayout.from_entries("m", entries)


@given(layout=meshes(), rows=st.lists(st.integers(), max_size=20), by_keyword=st.booleans())
def test_nd_dispatch_then_collect_is_the_identity_and_each_rank_sees_its_shard(layout, rows, by_keyword):
    group = Group(len(layout.dp_ranks), layout)
    mode = make_nd_compute_dataproto_dispatch_fn(mesh_name="m")
    shards = ListBatch(rows).chunk(layout.dp_size)

    def echo(rank, batch, temperature):
        assert batch == shards[layout.dp_ranks[rank]]
        assert temperature == 0.5
        return batch

    batch = ListBatch(rows)
    result = group.run(mode, echo, batch=batch, temperature=0.5) if by_keyword else group.run(mode, echo, batch, 0.5)
    assert result == batch

    dispatch_only = mode.dispatch_fn(group, (batch,), {})
    for dp_rank in range(layout.dp_size):  # one object per dp group: it is sent once
        assert len({id(dispatch_only[r][0][0]) for r, d in enumerate(layout.dp_ranks) if d == dp_rank}) == 1


@given(layout=meshes())
def test_nd_results_that_are_not_batches_come_in_dp_order(layout):
    group = Group(len(layout.dp_ranks), layout)
    result = group.run(make_nd_compute_dataproto_dispatch_fn("m"), lambda rank: (layout.dp_ranks[rank], rank))
    assert result == list(enumerate(layout.collect_ranks))


@given(rows=st.lists(st.integers(), max_size=9), world_size=st.integers(1, 5))
def test_dp_compute_proto_is_the_identity(rows, world_size):
    mode = get_dispatch_mode(Dispatch.DP_COMPUTE_PROTO)
    assert Group(world_size).run(mode, lambda _rank, batch: batch, ListBatch(rows)) == ListBatch(rows)


def test_one_to_all_and_rank_zero():
    group = Group(3)
    assert group.run(get_dispatch_mode(Dispatch.ONE_TO_ALL), lambda rank, x: (rank, x), "a") == [
        (0, "a"),
        (1, "a"),
        (2, "a"),
    ]
    assert group.run(get_dispatch_mode(Dispatch.RANK_ZERO), lambda rank, x: (rank, x), "a") == (0, "a")


@pytest.mark.parametrize("name", [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE])
def test_all_to_all_gives_each_rank_its_item(name):
    result = Group(2).run(get_dispatch_mode(name), lambda rank, x, y: (rank, x, y), [1, 2], y=("a", "b"))
    assert result == [(0, 1, "a"), (1, 2, "b")]
    with pytest.raises(
        ValueError,
        match=r"argument 'y' must be a list with one item for each of 2 ranks, or Replicate\(x\); got list of 3",
    ):
        Group(2).run(get_dispatch_mode(name), lambda rank, y: y, y=[1, 2, 3])
    with pytest.raises(
        ValueError, match=r"argument 0 must be a list with one item for each of 2 ranks, or Replicate\(x\); got int"
    ):
        Group(2).run(get_dispatch_mode(name), lambda rank, x: x, 5)


def test_replicate_and_shard_in_modes_that_split_nothing():
    batch = ListBatch([1, 2])
    whole = [(0, batch), (1, batch)]
    for name in (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL):
        assert Group(2).run(get_dispatch_mode(name), lambda rank, x: (rank, x), Replicate(batch)) == whole
    with pytest.raises(TypeError, match="needs a mode that splits batches"):
        Group(2).run(get_dispatch_mode(Dispatch.ONE_TO_ALL), lambda rank, x: x, x=Shard([1, 2]))


def test_custom_modes_are_registered_once():
    name = "TEST_REVERSED"
    mode = register_dispatch_mode(
        name,
        lambda group, args, kwargs: [((value,), {}) for value in reversed(args[0])],
        lambda group, results: results[::-1],
    )
    assert get_dispatch_mode(name) is mode
    assert Group(2).run(mode, lambda rank, value: (rank, value), ["a", "b"]) == [(1, "a"), (0, "b")]
    with pytest.raises(ValueError, match="'TEST_REVERSED' is registered already"):
        register_dispatch_mode(name, mode.dispatch_fn, mode.collect_fn)
    with pytest.raises(ValueError, match="'ONE_TO_ALL' is registered already"):
        register_dispatch_mode("ONE_TO_ALL", mode.dispatch_fn, mode.collect_fn)


def test_wrong_uses_of_register_are_refused():
    with pytest.raises(TypeError, match=r"got <function .*; write @register\(\.\.\.\) above a method"):
        register(lambda self: None)
    with pytest.raises(ValueError, match="'rank_zero' is not a valid Execute"):
        register(Dispatch.ONE_TO_ALL, "rank_zero")
    only_zero = register(Dispatch.ONE_TO_ALL, "RANK_ZERO")(lambda self: None)  # a string means what it says
    assert registered_methods(type("W", (), {"f": only_zero}))["f"].mode.name == "RANK_ZERO"


def test_an_unknown_mode_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown dispatch mode 'DP'; known modes: .*'DP_COMPUTE_PROTO'.*'RANK_ZERO'"):
        register(dispatch_mode="DP")


class Base(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def first(self): ...

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("m"), blocking=False, timeout_s=5)
    def second(self): ...

    def plain(self): ...


class Derived(Base):
    def first(self): ...

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def second(self): ...


def test_registered_methods():
    base, derived = registered_methods(Base), registered_methods(Derived)
    assert list(base) == ["first", "second"]
    assert (base["second"].mode.name, base["second"].blocking, base["second"].timeout_s) == ("nd_compute(m)", False, 5)
    assert base["first"].execute_mode is Execute.ALL
    assert derived["first"] == base["first"]  # an override keeps the registration
    assert (derived["second"].mode.name, derived["second"].execute_mode) == ("RANK_ZERO", Execute.RANK_ZERO)


def test_a_registered_function_is_the_function_itself():
    def fn(self):
        return 1

    assert register(Dispatch.ONE_TO_ALL)(fn) is fn


def test_rank_zero_execution_goes_only_with_modes_that_lose_nothing():
    spec = registered_methods(type("W", (), {"f": register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)(lambda self: 1)}))[
        "f"
    ]
    assert (spec.execute_mode, spec.mode.name) == (Execute.RANK_ZERO, "RANK_ZERO")
    with pytest.raises(ValueError, match="would lose the data that mode 'DP_COMPUTE_PROTO' sends to other ranks"):
        register(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO)


def test_generator_methods_are_refused():
    def several(self):
        yield 1

    async def several_later(self):
        yield 1

    for fn in (several, several_later):
        with pytest.raises(TypeError, match="is a generator function"):
            register(Dispatch.ONE_TO_ALL)(fn)


def test_a_mode_is_plain_data():
    assert isinstance(make_nd_compute_dataproto_dispatch_fn("m"), DispatchMode)
