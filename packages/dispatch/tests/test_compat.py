"""verl's names."""

import pytest
from tidemill_dispatch import Dispatch as TidemillDispatch
from tidemill_dispatch import ListBatch
from tidemill_dispatch.compat import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from tidemill_dispatch.method import registered_methods


def spec_of(decorator):
    return registered_methods(type("W", (), {"f": decorator(lambda self: None)}))["f"]


def test_predefined_modes_have_verl_names():
    assert Dispatch.DP_COMPUTE is Dispatch.ALL_TO_ALL is TidemillDispatch.ALL_TO_ALL
    assert Dispatch.DP_COMPUTE_PROTO.name == "split_over_ranks()"
    assert make_nd_compute_dataproto_dispatch_fn(mesh_name="actor").name == "split_over('actor')"


def test_execute_rank_zero_is_the_mode_rank_zero():
    assert spec_of(register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, False)).mode is TidemillDispatch.RANK_ZERO
    assert spec_of(register(Dispatch.ONE_TO_ALL, "RANK_ZERO")).mode is TidemillDispatch.RANK_ZERO
    assert spec_of(register()).mode is TidemillDispatch.ALL_TO_ALL
    assert not spec_of(register(Dispatch.ONE_TO_ALL, Execute.ALL, False)).blocking


def test_execute_rank_zero_is_refused_with_modes_that_send_data_to_other_ranks():
    with pytest.raises(ValueError, match=r"requires Dispatch.ONE_TO_ALL or .*, got split_over_ranks\(\), whose data"):
        register(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO)
    with pytest.raises(ValueError, match="'rank_zero' is not a valid Execute"):
        register(Dispatch.ONE_TO_ALL, "rank_zero")


def test_mode_of_verl_functions_dispatches_lists_by_rank():
    class Group:
        world_size = 2

        def mesh(self, name):
            raise KeyError(name)

    mode = register_dispatch_mode(
        "SPLIT_IN_TWO",
        dispatch_fn=lambda group, batch, *, x: ([batch.chunk(group.world_size)], {"x": [x] * group.world_size}),
        collect_fn=lambda group, results: ListBatch.concat(results),
    )
    calls = mode.dispatch_fn(Group(), (ListBatch([1, 2, 3]),), {"x": 5})
    assert calls == {0: ((ListBatch([1, 2]),), {"x": 5}), 1: ((ListBatch([3]),), {"x": 5})}
    assert mode.collect_fn(Group(), [calls[rank][0][0] for rank in calls]) == ListBatch([1, 2, 3])
    assert spec_of(register(mode)).mode is mode


def test_future_has_its_verl_name():
    pytest.importorskip("ray")
    from tidemill_dispatch.ray import CallFuture
    from tidemill_dispatch.ray.compat import DataProtoFuture

    assert DataProtoFuture is CallFuture
