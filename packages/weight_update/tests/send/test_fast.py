"""Fast path from one trainer process to toy engines: parameters after updates."""

import threading

import pytest
import torch
from tidemill_weight_update import LocalShard, WeightUpdater
from tidemill_weight_update.receive import plan_cache
from tidemill_weight_update.receive.receiver import Receiver
from tidemill_weight_update.send.sender import Sender
from torch import Tensor, nn
from toy_engines import ATTN, MODES, TIED, ToyEngine, ToyModel, as_mode, holds, same, state, tensors


@pytest.fixture
def recordings(monkeypatch) -> list[int]:
    """Number of sources of each recorded plan."""
    counted: list[int] = []
    original = plan_cache.record

    def record(model, sources):
        counted.append(len(sources))
        return original(model, sources)

    monkeypatch.setattr(plan_cache, "record", record)
    return counted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("tp_size", "bucket_bytes"), [(1, 1), (1, 200), (1, 1 << 20), (2, 200), (2, 1 << 20), (4, 100), (4, 1 << 20)]
)
def test_parameters_equal_a_fresh_load_bitwise(tp_size, mode, bucket_bytes):
    engine = ToyEngine(tp_size)
    updater = WeightUpdater([engine], bucket_bytes=bucket_bytes)
    for version in range(3):
        checkpoint = tensors(version)
        stats = updater.update(as_mode(checkpoint, mode), version)
        assert holds(engine, checkpoint)
        assert engine.version == stats.weight_version == str(version)
        assert (stats.verified, stats.num_unverified, stats.quarantined, stats.through_loader) == (True, 0, {}, {})
        assert stats.num_tensors == len(checkpoint)
        assert stats.num_bytes == sum(tensor.nbytes for tensor in checkpoint.values())
        assert (stats.num_buckets > 10) if bucket_bytes < 1000 else (stats.num_buckets == 1)
        assert 0 < stats.prepare_s + stats.fill_s + stats.load_s + stats.finish_s <= stats.seconds
    updater.close()


def test_engines_are_called_before_a_new_declaration_is_written(monkeypatch):
    called = threading.Event()

    class Engine(ToyEngine):
        def load(self, request, *, flush_cache):
            called.set()
            super().load(request, flush_cache=flush_cache)

    def declare(sender, buckets, device, declare=Sender.declare):
        assert called.wait(20)
        return declare(sender, buckets, device)

    monkeypatch.setattr(Sender, "declare", declare)
    engine = Engine(1)
    updater = WeightUpdater([engine])
    updater.update(tensors(0).items(), 0)
    assert holds(engine, tensors(0))
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_engines_of_different_tp_sizes_are_updated_together(mode):
    engines = [ToyEngine(2), ToyEngine(1), ToyEngine(4), ToyEngine(1, model=lambda r, n: ToyModel(r, n, torch.float32))]
    updater = WeightUpdater(engines, bucket_bytes=300)
    for version in range(2):
        checkpoint = tensors(version)
        updater.update(as_mode(checkpoint, mode), version)
        for engine in engines[:3]:
            assert holds(engine, checkpoint)
        reference = ToyModel(dtype=torch.float32)
        reference.load_weights(checkpoint.items())
        assert same(state(engines[3]), [dict(reference.named_parameters())])
    assert [engine.requests[-1].num_receivers for engine in engines] == [2, 1, 4, 1]
    assert [engine.requests[-1].first_receiver for engine in engines] == [0, 2, 3, 7]
    updater.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, None])
@pytest.mark.parametrize("held_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_are_cast_to_the_sent_dtype_and_then_to_the_parameter_dtype(held_dtype, dtype, mode):
    engine = ToyEngine(2)
    checkpoint = tensors(dtype=held_dtype)
    updater = WeightUpdater([engine], bucket_bytes=500, dtype=dtype)
    stats = updater.update(as_mode(checkpoint, mode), 1)
    assert holds(engine, {name: tensor.to(dtype or held_dtype) for name, tensor in checkpoint.items()})
    assert stats.num_bytes == sum(tensor.numel() for tensor in checkpoint.values()) * (dtype or held_dtype).itemsize
    updater.close()


def test_parts_of_a_tensor_may_have_different_dtypes_before_the_cast():
    engine, checkpoint = ToyEngine(1), tensors()
    whole = checkpoint.pop("embed.weight")
    parts = [(0, whole[:5].clone()), (5, whole[5:].bfloat16())]
    shards = [
        ("embed.weight", LocalShard(tensor=part, global_shape=tuple(whole.shape), start=(first, 0)))
        for first, part in parts
    ]
    updater = WeightUpdater([engine], dtype=torch.bfloat16)
    assert updater.update([*checkpoint.items(), *shards], 1).verified
    assert holds(engine, {name: tensor.bfloat16() for name, tensor in tensors().items()})
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_non_contiguous_tensors_and_parameters_with_requires_grad_are_sent(mode):
    engine = ToyEngine(2)
    plain = tensors()
    odd = {
        name: (t.t().contiguous().t() if t.dim() == 2 else t.repeat_interleave(3)[::3] if t.dim() == 1 else t)
        for name, t in plain.items()
    }
    odd[f"{ATTN}.o_proj.weight"] = nn.Parameter(plain[f"{ATTN}.o_proj.weight"])
    assert not odd["embed.weight"].is_contiguous()
    assert not odd["norm.weight"].is_contiguous()
    updater = WeightUpdater([engine], bucket_bytes=100)
    items = odd.items() if mode == "collection" else lambda: iter(odd.items())
    assert updater.update(items, 1).verified
    assert holds(engine, plain)
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_plan_is_recorded_once(recordings, mode):
    engine = ToyEngine(1)
    updater = WeightUpdater([engine], bucket_bytes=300)
    updater.update(as_mode(tensors(0), mode), 0)
    first = list(recordings)
    assert first == [len(tensors())]
    for version in (1, 2):
        updater.update(as_mode(tensors(version), mode), version)
    updater.update(as_mode(tensors(3), MODES[1 - MODES.index(mode)]), 3)
    assert recordings == first
    assert holds(engine, tensors(3))
    updater.close()


def test_unchanged_parameters_are_recognized_and_moved_ones_are_found(recordings):
    engine = ToyEngine(2)
    parameters = {name: nn.Parameter(tensor) for name, tensor in tensors().items()}
    updater = WeightUpdater([engine], bucket_bytes=300)
    updater.update(parameters.items(), 0)
    first = list(recordings)
    for version in (1, 2):
        with torch.no_grad():
            for name, tensor in tensors(version).items():
                parameters[name].copy_(tensor)
        updater.update(parameters.items(), version)
        assert holds(engine, tensors(version))
    with torch.no_grad():
        for name, tensor in tensors(3).items():
            parameters[name].data = tensor  # the same parameter with other memory
    updater.update(parameters.items(), 3)
    assert holds(engine, tensors(3))
    assert recordings == first
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_tensors_and_bucket_size_may_change_between_updates(mode):
    engine = ToyEngine(2)
    plain = tensors(1)
    reverse = dict(reversed(tensors(2).items()))
    half = {name: tensor.bfloat16() if "proj" in name else tensor for name, tensor in tensors(3).items()}
    with_tied = tensors(4) | {TIED: torch.randn(10, 8)}
    updater = WeightUpdater([engine], bucket_bytes=300)
    for version, checkpoint in enumerate((plain, reverse, half, with_tied, plain, half, plain)):
        updater.update(as_mode(checkpoint, mode), version)
        assert holds(engine, checkpoint), version
    updater.close()
    other = WeightUpdater([engine], bucket_bytes=1000)
    assert other.update(as_mode(reverse, mode), "other").verified
    assert holds(engine, reverse)
    other.close()


@pytest.mark.parametrize("mode", MODES)
def test_updates_work_inside_and_outside_inference_mode(mode):
    engine = ToyEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=200)
    for version, inference in enumerate([True, False, True, False]):
        with torch.inference_mode(inference):
            assert updater.update(as_mode(tensors(version), mode), version).verified
        assert holds(engine, tensors(version))
    updater.close()


def test_several_updaters_in_one_process_take_turns():
    engine = ToyEngine(2)
    updaters = [WeightUpdater([engine], bucket_bytes=size) for size in (100, 1000)]
    for version in range(6):
        updaters[version % 2].update(tensors(version).items(), version)
        assert holds(engine, tensors(version))
    for updater in updaters:
        updater.close()


class ComputingModel(ToyModel):
    """Model that computes with two of its tensors while loading."""

    def load_one(self, name: str, tensor: Tensor) -> None:
        if name == "norm.weight":
            self.norm.data.copy_(tensor + 1)
        elif name == f"{ATTN}.o_proj.weight":
            self.o.data.copy_((tensor.float() * 2).narrow(1, self.rank * self.o.shape[1], self.o.shape[1]))
        else:
            super().load_one(name, tensor)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_computed_parameters_go_through_the_loader(tp_size, mode):
    engine = ToyEngine(tp_size, model=ComputingModel)
    updater = WeightUpdater([engine], bucket_bytes=100)
    for version in range(2):
        stats = updater.update(as_mode(tensors(version), mode), version)
        assert sorted(stats.through_loader) == [f"{ATTN}.o_proj.weight", "norm.weight"]
        assert all(stats.through_loader.values())
        assert (stats.verified, stats.num_unverified) == (True, 2)  # the result of the loader is not verified
        assert holds(engine, tensors(version))
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_partial_update_reports_only_sent_tensors_as_through_loader(mode):
    engine = ToyEngine(1, model=ComputingModel)
    updater = WeightUpdater([engine])
    updater.update(tensors(0).items(), 0)
    for name, want in (("embed.weight", []), ("norm.weight", ["norm.weight"])):
        stats = updater.update(as_mode({name: tensors(1)[name]}, mode), 1, partial=True)
        assert (list(stats.through_loader), stats.num_unverified) == (want, len(want))
    assert holds(engine, tensors(0) | {name: tensors(1)[name] for name in ("embed.weight", "norm.weight")})
    updater.close()


class ComputingManyModel(nn.Module):
    """Model that computes with each of its many tensors while loading."""

    def __init__(self, *_: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(1500), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.p.data[int(name.split(".")[5])].copy_(tensor * 2)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_names_of_many_loader_tensors_are_truncated(tp_size):
    engine = ToyEngine(tp_size, model=ComputingManyModel)
    updater = WeightUpdater([engine])
    checkpoint = {f"model.layers.0.mlp.experts.{i}.down_proj.qweight": torch.tensor(float(i)) for i in range(1500)}
    stats = updater.update(checkpoint.items(), 1)
    assert (stats.verified, stats.num_unverified, stats.quarantined) == (True, 1500, {})
    assert list(stats.through_loader) == list(checkpoint)[:200]
    assert holds(engine, checkpoint)
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_partial_update_leaves_other_parameters_unchanged(mode):
    engine = ToyEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=300)
    updater.update(as_mode(tensors(0), mode), 0)
    part = {name: tensor for name, tensor in tensors(1).items() if ATTN in name}
    updater.update(as_mode(part, mode), 1, partial=True)
    assert holds(engine, tensors(0) | part)
    updater.update(as_mode(tensors(2), mode), 2)
    assert holds(engine, tensors(2))
    updater.close()


def test_engine_that_joins_late_gets_the_current_version():
    first, late = ToyEngine(1, "first"), ToyEngine(2, "late")
    updater = WeightUpdater([first])
    updater.update(tensors(1).items(), 1)
    updater.readmit([late], tensors(1).items(), 1)
    assert holds(late, tensors(1))
    assert (late.version, len(first.requests)) == ("1", 1)
    updater.update(tensors(2).items(), 2)  # it takes part in later updates
    assert holds(first, tensors(2))
    assert holds(late, tensors(2))
    updater.close()


def test_model_with_moved_parameters_is_updated_in_place():
    engine = ToyEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=300)
    updater.update(tensors(0).items(), 0)
    for model in engine.models:
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter.data, 9.0)
    updater.update(tensors(1).items(), 1)
    assert holds(engine, tensors(1))
    updater.close()


class CorruptingReceiver(Receiver):
    """Receiver whose first rank flips a bit of the bucket before it is read."""

    def copies(self, boxes, manifest):
        copies = super().copies(boxes, manifest)
        if self.model.rank == 0:
            (bucket,) = copies.all
            original = bucket.run

            def run(received, staging):
                bucket._blocks[0][1] ^= 4
                original(received, staging)

            bucket.run = run
        return copies


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_corrupted_bucket_is_detected_and_engine_is_not_updated(tp_size, mode):
    bad, good = ToyEngine(tp_size, "bad", receiver=CorruptingReceiver), ToyEngine(1, "good")
    updater = WeightUpdater([bad], bucket_bytes=1 << 20)
    with pytest.raises(RuntimeError, match=r"engine 0 of 1 \(bad\).*did not arrive as they were sent: 'embed.weight'"):
        updater.update(as_mode(tensors(), mode), 1)
    assert (bad.version, bad.paused) == ("first", "abort")
    stats = updater.readmit([good], as_mode(tensors(), mode), 2)
    assert (stats.verified, good.version, bad.version) == (True, "2", "first")
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_default_device_of_the_trainer_is_ignored(mode):
    engine = ToyEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=300)
    named_tensors = as_mode(tensors(), mode)
    with torch.device("meta"):
        assert updater.update(named_tensors, 1).verified
    assert holds(engine, tensors())
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_rewritten_by_complete_updates_only(mode):
    """An engine may have released its memory since, and got new memory at the same addresses."""
    engine = ToyEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=300)
    for version in range(3):
        updater.update(as_mode(tensors(version), mode), version)
        assert holds(engine, tensors(version))
        for model in engine.models:
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
    one = {"norm.weight": tensors(3)["norm.weight"]}
    updater.update(as_mode(one, mode), 3, partial=True)
    assert all(model.embed.isnan().all() for model in engine.models)  # a partial update writes its own tensors only
    updater.close()
