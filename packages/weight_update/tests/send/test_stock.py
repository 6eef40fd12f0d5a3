"""Stock path from one trainer process."""

import logging
import math
import pickle
import re

import numpy as np
import pytest
import torch
from stock_engine import StockToyEngine, assert_same
from tidemill_weight_update import BucketHandle, GroupLink, WeightUpdater
from tidemill_weight_update.sglang.payload import stock_payload
from toy_engines import ToyEngine, tensors


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
def test_all_tensors_arrive_bitwise_for_any_bucket_size(bucket_bytes):
    engine = StockToyEngine()
    updater = WeightUpdater([engine], bucket_bytes=bucket_bytes)
    for version in (1, 2):
        tensors = {name: tensor.detach() if version == 1 else tensor.detach() * 2 for name, tensor in mixed().items()}
        stats = updater.update(tensors.items(), version)
        assert_same(engine.weights, tensors)
        assert stats.num_tensors == len(tensors)
        assert stats.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
        assert engine.version == stats.weight_version == str(version)
        assert stats.num_buckets == sum(call.startswith("load") for call in engine.calls)
        stages = (stats.prepare_s, stats.gather_s, stats.fill_s, stats.load_s, stats.finish_s)
        assert min(stages) > 0
        assert sum(stages) < stats.seconds
        assert (stats.verified, stats.quarantined) == (False, {})
        assert stats.gb_per_s == pytest.approx(stats.num_bytes / stats.seconds / 1e9)
        engine.weights.clear()
        engine.calls.clear()
    updater.close()


def test_cast_equals_tensor_to():
    engine = StockToyEngine()
    tensors = mixed()
    WeightUpdater([engine], dtype=torch.bfloat16, bucket_bytes=500).update(tensors.items(), 1)
    expected = {n: t.detach().to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors.items()}
    assert_same(engine.weights, expected)


def test_version_is_set_and_cache_flushed_once_after_the_last_bucket():
    engines = [StockToyEngine(), StockToyEngine()]
    items = [(f"t{i}", torch.full((16,), float(i))) for i in range(3)]
    WeightUpdater(engines, bucket_bytes=64).update(items, "v7")
    for engine in engines:
        assert engine.calls == ["load 0", "load 1", "load 2", "flush", "version v7"]
        assert_same(engine.weights, dict(items))


def test_failed_engine_is_quarantined_and_others_are_updated():
    engines = [StockToyEngine(), StockToyEngine(fail_at=1)]
    updater = WeightUpdater(engines, bucket_bytes=64)
    items = [(f"t{i}", torch.full((8,), float(i))) for i in range(5)]
    message = r"did not load bucket 1 \('t1' .. 't1', 1 tensor\): gone"
    stats = updater.update(items, 1)
    assert list(stats.quarantined) == ["engine 1 of 2 (StockToyEngine)"]
    assert re.fullmatch(message, stats.quarantined["engine 1 of 2 (StockToyEngine)"])
    assert [engine.version for engine in engines] == ["1", "default"]
    assert engines[1].calls == ["load 0", "load 1", "pause abort"]
    engines[1].calls.clear()
    stats = updater.update(items, 2)
    assert stats.quarantined == {}
    assert re.fullmatch(message, stats.excluded["engine 1 of 2 (StockToyEngine)"])
    assert engines[1].calls == []  # skipped
    engines[1].fail_at = None
    stats = updater.readmit([engines[1]], items, 2)
    assert (stats.quarantined, stats.excluded) == ({}, {})
    assert (engines[1].version, engines[1].calls[-1]) == ("2", "resume")
    assert_same(engines[1].weights, dict(items))
    updater.update(items, 3)
    assert [engine.version for engine in engines] == ["3", "3"]


def test_engines_of_the_stock_path_are_named_once(caplog):
    updater = WeightUpdater([StockToyEngine()])
    with caplog.at_level(logging.WARNING):
        for version in range(3):
            updater.update([("t0", torch.zeros(8))], version)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "StockToyEngine was launched without sglang_launch_args()"
    ]


def test_engine_of_an_interrupted_update_is_listed_until_it_is_readmitted():
    engines = [StockToyEngine(), StockToyEngine()]
    updater = WeightUpdater(engines)
    engines[1].load_bucket = interrupted
    with pytest.raises(KeyboardInterrupt):
        updater.update([("t0", torch.zeros(8))], 1)
    with pytest.raises(RuntimeError, match=r"all engines are excluded .* call readmit\(\)"):
        updater.update([("t0", torch.zeros(8))], 2)
    del engines[1].load_bucket
    stats = updater.readmit(engines[:1], [("t0", torch.zeros(8))], 2)
    assert list(stats.excluded) == ["engine 1 of 2 (StockToyEngine)"]
    assert "KeyboardInterrupt" in stats.excluded["engine 1 of 2 (StockToyEngine)"]


def interrupted(bucket: BucketHandle) -> None:
    raise KeyboardInterrupt


def test_update_that_fails_on_all_engines_is_an_error():
    engines = [StockToyEngine(fail_at=1), StockToyEngine(fail_at=0)]
    updater = WeightUpdater(engines, bucket_bytes=64)
    items = [(f"t{i}", torch.zeros(8)) for i in range(5)]
    message = (
        r"engine 0 of 2 \(StockToyEngine\):? did not load bucket 1 .*; engine 1 of 2 \(StockToyEngine\):? did not load"
    )
    with pytest.raises(RuntimeError, match=message):
        updater.update(items, 1)
    engines[0].fail_at = engines[1].fail_at = None
    assert updater.readmit(engines, items, 2).quarantined == {}
    assert [engine.version for engine in engines] == ["2", "2"]


@pytest.mark.parametrize("error", [KeyError("lost"), KeyboardInterrupt()])
def test_function_that_raises_leaves_mixed_engine_paused(error):
    engine = StockToyEngine()
    updater = WeightUpdater([engine], bucket_bytes=64)
    raises = True

    def items():
        yield "t0", torch.zeros(8)
        yield "t1", torch.zeros(8)
        yield "t2", torch.zeros(8)
        if raises:
            raise error

    with pytest.raises(type(error)):
        updater.update(items, 1)
    assert engine.calls == []  # it raises when the tensors are described
    raises = False
    transfer = updater.declare(items)
    raises = True
    with pytest.raises(type(error)):
        transfer.send(1)
    assert engine.calls == ["load 0", "pause abort"]
    updater.readmit([engine], [("t0", torch.ones(8))], 2)
    assert (engine.version, engine.calls[-1]) == ("2", "resume")


@pytest.mark.parametrize("others", [0, 1])
def test_engine_that_cannot_be_paused_is_not_loaded(others):
    class Busy(StockToyEngine):
        def pause(self, mode: str) -> None:
            super().pause(mode)
            raise RuntimeError("requests do not end")

    engines = [Busy(), *(StockToyEngine() for _ in range(others))]
    updater = WeightUpdater(engines, in_flight="abort")
    if others:
        assert updater.update([("a", torch.zeros(1))], 1).quarantined == {
            "engine 0 of 2 (StockToyEngine)": "requests do not end"
        }
    else:
        with pytest.raises(RuntimeError, match=r"^engine 0 of 1 \(StockToyEngine\): requests do not end$"):
            updater.update([("a", torch.zeros(1))], 1)
    assert engines[0].calls == ["pause abort", "resume"]  # it may be paused in spite of the error


class Uncopyable(torch.Tensor):
    """A tensor that cannot be copied."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            raise RuntimeError("out of memory")
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize(("fails_at", "calls"), [(0, []), (2, ["load 0", "load 1", "pause abort"])])
def test_bucket_that_fails_to_fill_is_not_loaded(fails_at, calls):
    engine = StockToyEngine()
    items = [(f"t{i}", torch.full((8,), float(i))) for i in range(fails_at)]
    items.append((f"t{fails_at}", torch.zeros(8).as_subclass(Uncopyable)))
    with pytest.raises(RuntimeError, match="out of memory"):
        WeightUpdater([engine], bucket_bytes=32).update(items, 1)
    assert (engine.calls, engine.version) == (calls, "default")


def test_failed_cache_flush_is_an_error():
    with pytest.raises(RuntimeError, match=r"engine 0 of 1 .*did not flush its prefix cache: 1 running request"):
        WeightUpdater([StockToyEngine(busy=True)]).update([("a", torch.zeros(1))], 1)


class WrongVersionEngine(StockToyEngine):
    def get_weight_version(self) -> str:
        return "older"


def test_engine_that_reports_another_version_is_an_error():
    with pytest.raises(RuntimeError, match=r"engine 0 of 1 .*reports version 'older', expected '1'"):
        WeightUpdater([WrongVersionEngine()]).update([("a", torch.zeros(1))], 1)


def test_invalid_tensors_are_refused_before_the_engine_is_called():
    engine = StockToyEngine()
    updater = WeightUpdater([engine])
    for items, error, message in [
        ([], ValueError, "empty iterable"),
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], ValueError, "'a' was passed twice"),
        ({"a": torch.zeros(1)}, TypeError, "for a dict pass .items()"),
        (torch.nn.Linear(1, 1), TypeError, r"got Linear\(in_features=1, .*; pass \.named_parameters\(\)"),
    ]:
        with pytest.raises(error, match=message):
            updater.update(items, 1)
    with pytest.raises(ValueError, match="must not be empty"):
        updater.update([("a", torch.zeros(1))], "")
    assert engine.calls == []


def test_stock_engine_is_refused_with_a_link():
    """It would exit if it could not map the trainer's memory."""
    engines = [ToyEngine(), StockToyEngine()]
    with pytest.raises(
        ValueError, match=r"^engine 1 of 2 \(StockToyEngine\) cannot use a link .*start the server with"
    ):
        WeightUpdater(engines, link=GroupLink()).update(tensors().items(), 1)
    assert [engine.calls for engine in engines] == [[], []]


def test_cuda_device_without_index_is_the_current_one(monkeypatch):
    """Tensors of a device with another index, or none, are copied to the arena and not read in place."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    updater = WeightUpdater([ToyEngine(1)], device="cuda")
    assert updater._fast._device == updater._stock._device == torch.device("cuda:1")
    updater.close()


def test_bad_arguments_are_refused():
    for kwargs, message in [
        ({"bucket_bytes": 0}, "bucket_bytes must be a positive int, got 0"),
        ({"bucket_bytes": 1e9}, r"bucket_bytes must be a positive int, got 1000000000\.0"),
        ({"dtype": torch.int8}, "must be a floating-point dtype such as torch.bfloat16, got torch.int8"),
        ({"dtype": "bfloat16"}, "must be a floating-point dtype such as torch.bfloat16, got 'bfloat16'"),
        ({"in_flight": "pause"}, "in_flight must be one of 'wait', 'abort', 'retract', 'in_place', got 'pause'"),
        ({"timeout_s": 0}, "timeout_s must be positive and finite, got 0"),
        ({"timeout_s": math.inf}, "timeout_s must be positive and finite, got inf"),
        ({"timeout_s": math.nan}, "timeout_s must be positive and finite, got nan"),
        ({"device": "cuda:99"}, r"device is cuda:99, but this process has \d+ CUDA devices"),
    ]:
        with pytest.raises(ValueError, match=message):
            WeightUpdater([StockToyEngine()], **kwargs)
    with pytest.raises(TypeError, match="engines must be a list of engine clients, got StockToyEngine"):
        WeightUpdater(StockToyEngine())
    with pytest.raises(
        TypeError, match=r"expected an engine client as engine 1 of 2, got .*pass LocalEngine\(engine\)"
    ):
        WeightUpdater([StockToyEngine(), object()])
    with pytest.raises(TypeError, match=r"link must be a GroupLink, such as GroupLink\(host=.*got '10\.0\.0\.1'"):
        WeightUpdater([StockToyEngine()], link="10.0.0.1")
    with pytest.raises(TypeError, match=r"weight_version must be an int or a str, got np\.int64\(3\)"):
        WeightUpdater([StockToyEngine()]).update([("a", torch.zeros(1))], np.int64(3))
    twice = StockToyEngine()
    message = r"engine 2 of 3 \(StockToyEngine\) is listed twice; pass each engine once"
    with pytest.raises(ValueError, match=message):
        WeightUpdater([twice, StockToyEngine(), twice])
    with pytest.raises(ValueError, match=message):
        WeightUpdater([twice]).readmit([twice, StockToyEngine(), twice], [("a", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match="expected at least one engine on rank 0, got none"):
        WeightUpdater([]).update([("a", torch.zeros(1))], 1)
    updater = WeightUpdater([StockToyEngine()])
    updater.close()
    updater.close()
    with pytest.raises(RuntimeError, match="closed"):
        updater.update([("a", torch.zeros(1))], 1)


def test_bucket_handle_is_small_and_a_closed_sender_is_an_error():
    handles = []

    class Keeping(StockToyEngine):
        def load_bucket(self, bucket: BucketHandle) -> None:
            super().load_bucket(bucket)
            handles.append(bucket)

    updater = WeightUpdater([Keeping()])
    updater.update([(f"t{i}", torch.zeros(1000)) for i in range(50)], 1)
    assert len(pickle.dumps(handles[0])) < 10_000
    updater.close()
    with pytest.raises(RuntimeError, match=r"cannot open the sender's memory /proc/.*the sender must be alive"):
        stock_payload(handles[0])
