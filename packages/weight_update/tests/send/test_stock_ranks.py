"""Stock path from several trainer ranks. Functions with a leading underscore run on all ranks."""

import re

import torch
import torch.distributed as dist
from stock_engine import StockToyEngine, assert_same
from tidemill_testing import run_ranks
from tidemill_weight_update import WeightUpdater


def layouts() -> dict[str, torch.Tensor]:
    """DTensors of four ranks in common layouts, and a plain tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {
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
        "hybrid": distribute_tensor(torch.randn(7, 3), square, [Replicate(), Shard(0)]),
        "grid": distribute_tensor(torch.randn(7, 5), square, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(torch.randn(7, 5), square, [Shard(0), Shard(0)]),
    }


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


def _send_all():
    return [_send_layouts(256, None), _send_layouts(1 << 20, torch.bfloat16)]


def test_every_dtensor_layout_arrives_bitwise():
    for results in zip(*run_ranks(_send_all, 4), strict=True):
        assert len({result[:2] for result in results}) == 1
        assert [loads for _, _, loads in results] == [True, False, False, False]


def _outcome(items, engines=(), bucket_bytes=128, *, excludes=True) -> str:
    updater = WeightUpdater(engines, bucket_bytes=bucket_bytes)
    try:
        updater.update(items, 1)
    except RuntimeError as error:
        first = f"{type(error).__name__}: {error}"
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
    assert results[0][1] == ["load 0", "flush", "version 2"]
