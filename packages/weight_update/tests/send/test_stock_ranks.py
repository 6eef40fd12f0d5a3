"""Stock path from several trainer ranks. Functions with a leading underscore run on all ranks."""

import re

import pytest
import torch
import torch.distributed as dist
from process_engines import serve, trainers
from stock_engine import StockToyEngine, assert_same
from tidemill_testing import run_ranks
from tidemill_weight_update import WeightUpdater


def layouts() -> dict[str, torch.Tensor]:
    """DTensors in common layouts, and a plain tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    tensors = {
        "even": distribute_tensor(torch.randn(8, 3), line, [Shard(0)]),
        "uneven": distribute_tensor(torch.randn(7, 3), line, [Shard(0)]),
        "fewer_rows_than_ranks": distribute_tensor(torch.randn(1, 3), line, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(3, 9), line, [Shard(1)]),
        "last": distribute_tensor(torch.randn(2, 3, 5), line, [Shard(-1)]),
        "replicated": distribute_tensor(torch.randn(5), line, [Replicate()]),
        "ints": distribute_tensor(torch.arange(9), line, [Shard(0)]),
        "empty": distribute_tensor(torch.empty(0, 3), line, [Shard(0)]),
        "half": distribute_tensor(torch.randn(5, 2).half(), line, [Shard(0)]),
        "plain": torch.randn(6),
    }
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        tensors["hybrid"] = distribute_tensor(torch.randn(7, 3), square, [Replicate(), Shard(0)])
        tensors["grid"] = distribute_tensor(torch.randn(7, 5), square, [Shard(0), Shard(1)])
        tensors["twice"] = distribute_tensor(torch.randn(7, 5), square, [Shard(0), Shard(0)])
    return tensors


def _send_layouts(bucket_bytes: int, dtype: torch.dtype | None):
    from torch.distributed.tensor import DTensor

    tensors = layouts()
    expected = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    expected = {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in expected.items()}
    engine = StockToyEngine()
    updater = WeightUpdater([engine] if dist.get_rank() == 0 else [], bucket_bytes=bucket_bytes, dtype=dtype)
    stats = updater.update(tensors.items(), 3)
    if dist.get_rank() == 0:
        assert_same(engine.weights, expected)
        assert engine.version == "3"
    updater.close()
    return stats.num_bytes, stats.num_buckets, stats.load_s > 0


def _send_all(cases):
    return [_send_layouts(*case) for case in cases]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, [(1, None), (256, torch.bfloat16)]), (4, [(256, None), (1 << 20, torch.bfloat16)])],
)
def test_every_dtensor_layout_arrives_bitwise(world_size, cases):
    for results in zip(*run_ranks(_send_all, world_size, cases), strict=True):
        assert len({result[:2] for result in results}) == 1
        assert [loads for _, _, loads in results] == [True] + [False] * (world_size - 1)


def _outcome(items, engines=(), bucket_bytes=128, *, excludes=True) -> str:
    updater = WeightUpdater(engines, bucket_bytes=bucket_bytes)
    try:
        updater.update(items, 1)
    except (RuntimeError, ValueError, KeyError) as error:
        first = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    else:
        first = "ok"
    again = [("t", torch.zeros(4))]  # the ranks can update again after the error
    for engine in engines:
        engine.fail_at = None
    if excludes:
        updater.readmit(engines, again, 2)
    else:
        updater.update(again, 2)
    return first


def _iterator_raises(bad_rank: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))

    def items():
        for i in range(10):
            if i == 5 and dist.get_rank() == bad_rank:
                raise KeyError("lost")
            yield f"t{i}", DTensor.from_local(torch.zeros(8), mesh, [Shard(0)])

    engine = StockToyEngine()
    return _outcome(items(), [engine] if dist.get_rank() == 0 else []), engine.version


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_iterator_that_raises_on_one_rank_is_an_error_on_all(bad_rank):
    results = run_ranks(_iterator_raises, 2, bad_rank, timeout_s=60)
    assert results[bad_rank][0] == f"KeyError: 'lost'; raised on rank {bad_rank} of 2 of this weight update"
    assert results[1 - bad_rank][0] == f"RuntimeError: weight update failed on rank {bad_rank} of 2: KeyError: 'lost'"
    assert results[0][1] == "2"


def _wrong_local_shape(bad_rank: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(5 if dist.get_rank() == bad_rank else 4, 3)
    tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((8, 3)), stride=(3, 1), run_check=False)
    engine = StockToyEngine()
    items = [("good", torch.zeros(40)), ("uneven", tensor)]
    message = _outcome(items, [engine] if dist.get_rank() == 0 else [])
    dist.barrier()  # no rank is left in another collective
    return message, engine.calls


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_wrong_local_shape_on_one_rank_is_an_error_on_all(bad_rank):
    results = run_ranks(_wrong_local_shape, 2, bad_rank, timeout_s=60)
    message = f"ValueError: tensor 'uneven' has local shape (5, 3) on rank {bad_rank}, but its placements"
    assert results[bad_rank][0].startswith(message)
    assert results[1 - bad_rank][0].startswith(f"RuntimeError: weight update failed on rank {bad_rank} of 2: {message}")
    assert results[0][1] == ["load 0 2", "flush", "resume"]  # nothing was sent before


def _engine_fails():
    items = [(f"t{i}", torch.zeros(32)) for i in range(4)]
    return _outcome(items, [StockToyEngine(fail_at=2)] if dist.get_rank() == 0 else [])


def test_failed_engine_is_an_error_on_all_ranks():
    first, second = run_ranks(_engine_fails, 2, timeout_s=60)
    assert re.match(r"RuntimeError: engine 0 of 1 \(StockToyEngine\): did not load bucket 2", first)
    assert re.match(r"RuntimeError: weight update failed on rank 0 of 2: RuntimeError: engine 0 of 1", second)


def _different_order():
    items = [("a", torch.zeros(4)), ("b", torch.zeros(4))]
    engine = StockToyEngine()
    ordered = items if dist.get_rank() == 0 else items[::-1]
    message = _outcome(ordered, [engine] if dist.get_rank() == 0 else [], excludes=False)
    return message, engine.calls


def test_different_tensor_order_on_ranks_is_an_error():
    results = run_ranks(_different_order, 2, timeout_s=60)
    for message, _ in results:
        assert re.match(r"RuntimeError: the ranks disagree .*rank 0: .*'a' .. 'b'.*rank 1: .*'b' .. 'a'", message), (
            message
        )
    assert results[0][1] == ["load 0 2", "flush"]


def test_killed_rank_is_an_error(tmp_path):
    engine = StockToyEngine()
    with trainers(2, str(tmp_path / "store"), 1, "streaming") as connection:
        message = serve(engine, connection)
    assert message is not None
    assert message.startswith("RankLostError: a trainer rank does not respond"), message
    assert engine.version == "default"


def _subgroup():
    group = dist.new_group([1, 2])
    engine = StockToyEngine()
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="not a member of process_group"):
            WeightUpdater([engine], process_group=group)
        return None
    updater = WeightUpdater([engine] if dist.get_rank() == 1 else [], process_group=group)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    updater.update([("a", distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))], 1)
    return engine.weights["a"].tolist() if dist.get_rank() == 1 else None


def test_subgroup_of_ranks_can_update():
    assert run_ranks(_subgroup, 3) == [None, [0.0, 1.0, 2.0, 3.0, 4.0], None]


def _fsdp2():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, bias=False))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    engine = StockToyEngine()
    WeightUpdater([engine] if dist.get_rank() == 0 else []).update(model.state_dict().items(), 1)
    if dist.get_rank() == 0:
        assert_same(engine.weights, expected)
    model(torch.zeros(2, 7)).sum().backward()  # the model still trains
    return True


def test_fsdp2_model_arrives_bitwise():
    assert run_ranks(_fsdp2, 2) == [True, True]
