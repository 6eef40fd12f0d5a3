"""Dispatch then collect, over groups without processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dispatch import (
    Dispatch,
    DispatchMode,
    ListBatch,
    MeshLayout,
    Replicate,
    Shard,
    split_over,
    split_over_ranks,
)
from tidemill_dispatch.mesh import MeshEntry


class Group:
    """What a mode reads of a group, and a run of a call over it without processes."""

    def __init__(self, world_size, layout=None):
        self.world_size = world_size
        self._layout = layout

    def mesh(self, name):
        assert self._layout is not None
        assert name == "m"
        return self._layout

    def run(self, mode, fn, *args, **kwargs):
        calls = mode.dispatch_fn(self, args, kwargs)
        results = {rank: fn(rank, *rank_args, **rank_kwargs) for rank, (rank_args, rank_kwargs) in calls.items()}
        collect_ranks = list(calls) if mode.collect_ranks_fn is None else mode.collect_ranks_fn(self)
        return mode.collect_fn(self, [results[rank] for rank in collect_ranks])


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
def test_split_over_then_collect_is_identity_and_each_rank_sees_its_shard(layout, rows, by_keyword):
    group = Group(len(layout.dp_ranks), layout)
    mode = split_over("m")
    shards = ListBatch(rows).chunk(layout.dp_size)

    def echo(rank, batch, temperature):
        assert batch == shards[layout.dp_ranks[rank]]
        assert temperature == 0.5
        return batch

    batch = ListBatch(rows)
    result = group.run(mode, echo, batch=batch, temperature=0.5) if by_keyword else group.run(mode, echo, batch, 0.5)
    assert result == batch

    calls = mode.dispatch_fn(group, (batch,), {})
    for dp_rank in range(layout.dp_size):  # one object per dp group is sent once
        assert len({id(calls[r][0][0]) for r, d in enumerate(layout.dp_ranks) if d == dp_rank}) == 1


@given(layout=meshes())
def test_results_that_are_not_batches_are_a_list_in_dp_order(layout):
    group = Group(len(layout.dp_ranks), layout)
    result = group.run(split_over("m"), lambda rank: (layout.dp_ranks[rank], rank))
    assert result == list(enumerate(layout.collect_ranks))


@given(rows=st.lists(st.integers(), max_size=9), world_size=st.integers(1, 5))
def test_split_over_ranks_then_collect_is_identity(rows, world_size):
    assert Group(world_size).run(split_over_ranks(), lambda _rank, batch: batch, ListBatch(rows)) == ListBatch(rows)


def test_one_to_all_returns_list_and_rank_zero_runs_rank_zero_only():
    group, ran = Group(3), []
    assert group.run(Dispatch.ONE_TO_ALL, lambda rank, x: (rank, x), "a") == [(0, "a"), (1, "a"), (2, "a")]
    assert group.run(Dispatch.RANK_ZERO, lambda rank, x: ran.append(rank) or (rank, x), "a") == (0, "a")
    assert ran == [0]


def test_all_to_all_gives_each_rank_its_item():
    result = Group(2).run(Dispatch.ALL_TO_ALL, lambda rank, x, y: (rank, x, y), [1, 2], y=("a", "b"))
    assert result == [(0, 1, "a"), (1, 2, "b")]
    message = (
        r"argument 'y' must be a list with one item for each of the 2 ranks, or Replicate\(x\); got list of length 3"
    )
    with pytest.raises(ValueError, match=message):
        Group(2).run(Dispatch.ALL_TO_ALL, lambda rank, y: y, y=[1, 2, 3])
    message = r"argument 0 must be a list with one item for each of the 2 ranks, or Replicate\(x\); got int"
    with pytest.raises(ValueError, match=message):
        Group(2).run(Dispatch.ALL_TO_ALL, lambda rank, x: x, 5)


def test_modes_that_split_nothing_accept_replicate_and_refuse_shard():
    batch = ListBatch([1, 2])
    whole = [(0, batch), (1, batch)]
    for mode in (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL):
        assert Group(2).run(mode, lambda rank, x: (rank, x), Replicate(batch)) == whole
    for mode in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
        with pytest.raises(TypeError, match=r"Shard\(list\) requires a mode that splits batches"):
            Group(2).run(mode, lambda rank, x: x, x=Shard([1, 2]))


def test_custom_mode_dispatches_and_collects():
    mode = DispatchMode(
        name="reversed",
        dispatch_fn=lambda group, args, kwargs: {rank: ((value,), {}) for rank, value in enumerate(reversed(args[0]))},
        collect_fn=lambda group, results: results[::-1],
    )
    assert Group(2).run(mode, lambda rank, value: (rank, value), ["a", "b"]) == [(1, "a"), (0, "b")]
