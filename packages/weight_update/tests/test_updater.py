"""The updater on the stock path, against engines that are small classes of this file."""

import os
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from tidemill_testing import run_ranks
from tidemill_weight_update import BucketHandle, WeightUpdater
from tidemill_weight_update.sglang.payload import stock_payload


class MemoryEngine:
    """Loads as SGLang does: unpickles the payload, and copies every tensor to a dict."""

    has_loader = False

    def __init__(self, fail_at: int | None = None, busy: bool = False) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.version = "default"
        self.fail_at = fail_at
        self.busy = busy

    def __repr__(self) -> str:
        return "MemoryEngine"

    @property
    def tp_size(self) -> int:
        return 1

    def load_bucket(self, bucket: BucketHandle) -> None:
        self.calls.append(f"load {bucket.index} {bucket.weight_version}")
        if bucket.index == self.fail_at:
            raise ConnectionError("gone")
        bucket = pickle.loads(pickle.dumps(bucket))
        payload = pickle.loads(stock_payload(bucket))
        for meta in payload["metadata"]:
            flat = payload["flattened_tensor"][meta.start_idx : meta.end_idx]
            self.weights[meta.name] = flat.view(meta.dtype).reshape(meta.shape).clone()
        if bucket.weight_version is not None:
            self.version = bucket.weight_version

    def flush_cache(self) -> None:
        self.calls.append("flush")
        if self.busy:
            raise RuntimeError("1 running request")

    def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    def resume(self) -> None:
        self.calls.append("resume")

    def get_weight_version(self) -> str:
        return self.version


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name], tensor), name


def mixed() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "scalar": torch.tensor(3.5),
        "odd": torch.randn(3, 5).to(torch.bfloat16),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "wide": torch.randn(33, 17),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(8, 6).t(),
        "strided": torch.randn(20)[::3],
        "flags": torch.tensor([True, False, True]),
        "int": torch.tensor([2**40, -1]),
        "parameter": torch.nn.Parameter(torch.randn(4)),
    }


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1000, 1 << 20])
def test_every_tensor_arrives_bit_for_bit_whatever_the_buckets(bucket_bytes):
    engine = MemoryEngine()
    updater = WeightUpdater([engine], bucket_bytes=bucket_bytes)
    for version in (1, 2):
        tensors = {name: tensor.detach() if version == 1 else tensor.detach() * 2 for name, tensor in mixed().items()}
        stats = updater.update(tensors.items(), version)
        assert_same(engine.weights, tensors)
        assert stats.num_tensors == len(tensors)
        assert stats.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
        assert engine.version == stats.weight_version == str(version)
        assert stats.num_buckets == sum(call.startswith("load") for call in engine.calls)
        assert 0 < stats.gather_s + stats.fill_s + stats.load_s + stats.finish_s < stats.seconds
        assert (stats.verified, stats.fenced, stats.prepare_s) == (False, {}, 0.0)
        assert stats.gb_per_s == pytest.approx(stats.num_bytes / stats.seconds / 1e9)
        engine.weights.clear()
        engine.calls.clear()
    updater.close()


def test_the_cast_is_that_of_to():
    engine = MemoryEngine()
    tensors = mixed()
    WeightUpdater([engine], dtype=torch.bfloat16, bucket_bytes=500).update(tensors.items(), 1)
    expected = {n: t.detach().to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors.items()}
    assert_same(engine.weights, expected)


def test_the_version_comes_with_the_last_bucket_and_one_flush_ends_the_update():
    engines = [MemoryEngine(), MemoryEngine()]
    items = [(f"t{i}", torch.full((16,), float(i))) for i in range(3)]
    WeightUpdater(engines, bucket_bytes=64).update(items, "v7")
    for engine in engines:
        assert engine.calls == ["load 0 None", "load 1 None", "load 2 v7", "flush"]
        assert_same(engine.weights, dict(items))


def test_an_engine_that_fails_is_fenced_and_the_others_go_on():
    engines = [MemoryEngine(), MemoryEngine(fail_at=1)]
    updater = WeightUpdater(engines, bucket_bytes=64)
    items = [(f"t{i}", torch.full((8,), float(i))) for i in range(5)]
    told = r"did not load bucket 1 \('t1' .. 't1', 1 tensor\): gone"
    stats = updater.update(items, 1)
    assert list(stats.fenced) == ["engine 1 of 2 (MemoryEngine)"]
    assert re.fullmatch(told, stats.fenced["engine 1 of 2 (MemoryEngine)"])
    assert [engine.version for engine in engines] == ["1", "default"]
    assert engines[1].calls == ["load 0 None", "load 1 None", "pause abort"]
    engines[1].calls.clear()
    assert updater.update(items, 2).fenced == {}
    assert engines[1].calls == []  # left out
    engines[1].fail_at = None
    stats = updater.update(items, 2, engines=[engines[1]])
    assert (stats.fenced, engines[1].version, engines[1].calls[-1]) == ({}, "2", "resume")
    assert_same(engines[1].weights, dict(items))
    updater.update(items, 3)
    assert [engine.version for engine in engines] == ["3", "3"]


def test_an_update_that_reaches_no_engine_is_an_error():
    engines = [MemoryEngine(fail_at=1), MemoryEngine(fail_at=0)]
    updater = WeightUpdater(engines, bucket_bytes=64)
    items = [(f"t{i}", torch.zeros(8)) for i in range(5)]
    message = (
        r"engine 0 of 2 \(MemoryEngine\):? did not load bucket 1 .*; engine 1 of 2 \(MemoryEngine\):? did not load"
    )
    with pytest.raises(RuntimeError, match=message):
        updater.update(items, 1)
    engines[0].fail_at = engines[1].fail_at = None
    assert updater.update(items, 2).fenced == {}  # none is healthy, so all are tried
    assert [engine.version for engine in engines] == ["2", "2"]


@pytest.mark.parametrize("error", [KeyError("lost"), KeyboardInterrupt()])
def test_an_iterator_that_raises_half_way_fences_engines_that_hold_a_mix(error):
    engine = MemoryEngine()
    updater = WeightUpdater([engine], bucket_bytes=64)

    def items():
        yield "t0", torch.zeros(8)
        yield "t1", torch.zeros(8)
        yield "t2", torch.zeros(8)
        raise error

    with pytest.raises(type(error)):
        updater.update(items(), 1)
    assert engine.calls == ["load 0 None", "pause abort"]
    updater.update([("t0", torch.ones(8))], 2)
    assert (engine.version, engine.calls[-1]) == ("2", "resume")


def test_a_prefix_cache_that_is_not_flushed_is_an_error():
    with pytest.raises(RuntimeError, match=r"engine 0 of 1 .*did not flush its prefix cache: 1 running request"):
        WeightUpdater([MemoryEngine(busy=True)]).update([("a", torch.zeros(1))], 1)


class Forgetful(MemoryEngine):
    def get_weight_version(self) -> str:
        return "older"


def test_an_engine_that_reports_another_version_is_an_error():
    with pytest.raises(RuntimeError, match=r"engine 0 of 1 .*reports version 'older', expected '1'"):
        WeightUpdater([Forgetful()]).update([("a", torch.zeros(1))], 1)


def test_what_cannot_be_sent_leaves_the_engine_alone():
    engine = MemoryEngine()
    updater = WeightUpdater([engine])
    for items, error, message in [
        ([], ValueError, "empty iterable"),
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], ValueError, "'a' came twice"),
        ({"a": torch.zeros(1)}, TypeError, "of a dict pass .items()"),
    ]:
        with pytest.raises(error, match=message):
            updater.update(items, 1)
    with pytest.raises(ValueError, match="must not be empty"):
        updater.update([("a", torch.zeros(1))], "")
    assert engine.calls == []


def test_bad_arguments_are_refused():
    for kwargs, message in [
        ({"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
        ({"dtype": torch.int8}, "must be a floating-point dtype, got torch.int8"),
    ]:
        with pytest.raises(ValueError, match=message):
            WeightUpdater([MemoryEngine()], **kwargs)
    with pytest.raises(ValueError, match="rank 0 talks to the engines, but was given none"):
        WeightUpdater([]).update([("a", torch.zeros(1))], 1)
    updater = WeightUpdater([MemoryEngine()])
    updater.close()
    updater.close()
    with pytest.raises(RuntimeError, match="closed"):
        updater.update([("a", torch.zeros(1))], 1)


def test_a_handle_is_small_and_a_dead_sender_is_an_error():
    handles = []

    class Keeping(MemoryEngine):
        def load_bucket(self, bucket: BucketHandle) -> None:
            super().load_bucket(bucket)
            handles.append(bucket)

    updater = WeightUpdater([Keeping()])
    updater.update([(f"t{i}", torch.zeros(1000)) for i in range(50)], 1)
    assert len(pickle.dumps(handles[0])) < 10_000
    updater.close()
    with pytest.raises(RuntimeError, match=r"cannot open the sender's memory /proc/.*the sender must be alive"):
        stock_payload(handles[0])


# Several ranks. Everything below runs inside gloo processes, one function per test.


def layouts() -> dict[str, torch.Tensor]:
    """DTensors in the layouts that trainers have, and a plain tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

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
        "partial": DTensor.from_local(torch.randn(4) * 1e-3, line, [Partial()]),
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
    engine = MemoryEngine()
    updater = WeightUpdater([engine] if dist.get_rank() == 0 else [], bucket_bytes=bucket_bytes, dtype=dtype)
    stats = updater.update(tensors.items(), 3)
    if dist.get_rank() == 0:
        assert_same(engine.weights, expected)
        assert engine.version == "3"
    updater.close()
    return stats.num_bytes, stats.num_buckets, stats.load_s > 0


@pytest.mark.parametrize(
    ("world_size", "bucket_bytes", "dtype"),
    [(2, 1, None), (2, 256, torch.bfloat16), (4, 256, None), (4, 1 << 20, torch.bfloat16)],
)
def test_every_layout_arrives_bit_for_bit(world_size, bucket_bytes, dtype):
    results = run_ranks(_send_layouts, world_size, bucket_bytes, dtype)
    assert len({result[:2] for result in results}) == 1
    assert [loads for _, _, loads in results] == [True] + [False] * (world_size - 1)


def _outcome(items, engines=(), bucket_bytes=128) -> str:
    updater = WeightUpdater(engines, bucket_bytes=bucket_bytes)
    try:
        updater.update(items, 1)
    except (RuntimeError, ValueError, KeyError) as error:
        first = f"{type(error).__name__}: {error}"
    else:
        first = "ok"
    again = [("t", torch.zeros(4))]  # whatever happened, ranks and updater can go on together
    for engine in engines:
        engine.fail_at = None
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

    engine = MemoryEngine()
    return _outcome(items(), [engine] if dist.get_rank() == 0 else []), engine.version


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_iterator_that_raises_on_one_rank_raises_on_all(bad_rank):
    results = run_ranks(_iterator_raises, 2, bad_rank, timeout_s=60)
    assert results[bad_rank][0] == "KeyError: 'lost'"
    assert results[1 - bad_rank][0] == f"RuntimeError: weight update failed on rank {bad_rank} of 2: KeyError: 'lost'"
    assert results[0][1] == "2"


def _engine_fails():
    items = [(f"t{i}", torch.zeros(32)) for i in range(4)]
    return _outcome(items, [MemoryEngine(fail_at=2)] if dist.get_rank() == 0 else [])


def test_an_engine_that_fails_on_rank_0_is_an_error_on_all():
    first, second = run_ranks(_engine_fails, 2, timeout_s=60)
    assert re.match(r"RuntimeError: engine 0 of 1 \(MemoryEngine\): did not load bucket 2", first)
    assert re.match(r"RuntimeError: weight update failed on rank 0 of 2: RuntimeError: engine 0 of 1", second)


def _different_order():
    items = [("a", torch.zeros(4)), ("b", torch.zeros(4))]
    engine = MemoryEngine()
    told = _outcome(items if dist.get_rank() == 0 else items[::-1], [engine] if dist.get_rank() == 0 else [])
    return told, engine.calls


def test_ranks_that_pass_different_tensors_are_told_so():
    results = run_ranks(_different_order, 2, timeout_s=60)
    for told, _ in results:
        assert re.match(r"RuntimeError: the ranks disagree .*rank 0: .*'a' .. 'b'.*rank 1: .*'b' .. 'a'", told), told
    assert results[0][1] == ["load 0 2", "flush"]


def _killed(flag: str):
    class Waiting(MemoryEngine):
        def load_bucket(self, bucket) -> None:
            super().load_bucket(bucket)
            while bucket.index == 1 and not os.path.exists(flag):
                pass

    def items():
        for i in range(10):
            if i == 3 and dist.get_rank() == 1:
                open(flag, "w").close()
                os._exit(9)
            yield f"t{i}", torch.zeros(16)

    WeightUpdater([Waiting()] if dist.get_rank() == 0 else [], bucket_bytes=64).update(items(), 1)


def test_a_rank_that_dies_is_an_error_not_a_hang(tmp_path):
    with pytest.raises(RuntimeError, match=r"(Connection|peer|exit codes \{1: 9\})"):
        run_ranks(_killed, 2, str(tmp_path / "flag"), timeout_s=60)


def _subgroup():
    group = dist.new_group([1, 2])
    engine = MemoryEngine()
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


def test_some_ranks_of_a_larger_job_can_update():
    assert run_ranks(_subgroup, 3) == [None, [0.0, 1.0, 2.0, 3.0, 4.0], None]


def _fsdp2():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, bias=False))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    engine = MemoryEngine()
    WeightUpdater([engine] if dist.get_rank() == 0 else []).update(model.state_dict().items(), 1)
    if dist.get_rank() == 0:
        assert_same(engine.weights, expected)
    model(torch.zeros(2, 7)).sum().backward()  # the model is none the worse for it
    return True


def test_an_fsdp2_model_arrives_bit_for_bit():
    assert run_ranks(_fsdp2, 2) == [True, True]
