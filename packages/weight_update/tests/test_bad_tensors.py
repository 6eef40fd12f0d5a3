"""Tensors that must not reach the engines: reported errors, and weights of the engines afterwards."""

import pytest
import torch
from sources import WithEvent, fail
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.copy import copier
from toy_engines import ATTN, TIED, ToyEngine, ToyModel, holds, tensors

MODES = ["collection", "function"]
K = f"{ATTN}.k_proj.weight"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def as_named_tensors(items, mode: str):
    items = list(items)
    return items if mode == "collection" else lambda: iter(items)


def nan(checkpoint):
    checkpoint[K][1, 3] = float("nan")


def nan_in_first_bucket(checkpoint):
    checkpoint["embed.weight"][0, 0] = float("nan")


def infinite(checkpoint):
    checkpoint[K][1, 3] = -float("inf")


def wider(checkpoint):
    checkpoint[K] = torch.zeros(2, 9)


def longer(checkpoint):
    """Too long tensor; each rank takes as many rows as it has, as SGLang's linear layers do."""
    checkpoint[f"{ATTN}.q_proj.weight"] = torch.zeros(9, 8)


def integers(checkpoint):
    checkpoint[K] = torch.zeros(2, 8, dtype=torch.int32)


def scaled(checkpoint):
    """Quantized values without their scale."""
    checkpoint[K] = checkpoint[K].to(torch.float8_e4m3fn)


def unknown(checkpoint):
    checkpoint["layers.7.mlp.weight"] = torch.zeros(3)


def missing(checkpoint):
    del checkpoint[K]


NOT_FINITE = rf"1 of the tensors have infinite or NaN elements: '{K}'"
RANK = r"engine 0 of 1 \(toy\): rank \d(, \d)*: .*"
BAD = {
    nan: (ValueError, NOT_FINITE),
    nan_in_first_bucket: (ValueError, r"1 of the tensors have infinite or NaN elements: 'embed.weight'"),
    infinite: (ValueError, NOT_FINITE),
    wider: (RuntimeError, rf"{RANK}load_weights failed at source '{K}' \(2, 9\)"),
    longer: (RuntimeError, rf"{RANK}only a part of these tensors: '{ATTN}.q_proj.weight' \(64 of 72 elements\)"),
    integers: (RuntimeError, rf"{RANK}'{K}' has the wrong dtype: it is cast from torch.int32 to torch.bfloat16"),
    scaled: (RuntimeError, rf"{RANK}'{K}' has the wrong dtype: it is cast from torch.float8_e4m3fn to torch.bfloat16"),
    unknown: (RuntimeError, rf"{RANK}no parameter for these tensors: 'layers.7.mlp.weight'"),
    missing: (
        RuntimeError,
        rf"{RANK}no tensor was sent for these parameters of the engine: 'qkv' \(\d+ elements\); "
        rf"tensors of the last complete update that are missing now: '{K}'",
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("change", BAD, ids=lambda change: change.__name__)
def test_bad_tensors_are_refused_by_name(change, tp_size, mode):
    engine = ToyEngine(tp_size)
    updater = WeightUpdater([engine], bucket_bytes=300)
    updater.update(as_named_tensors(tensors(0).items(), mode), "good")
    bad = tensors(1)
    change(bad)
    error, message = BAD[change]
    with pytest.raises(error, match=message):
        updater.update(as_named_tensors(bad.items(), mode), "bad")
    assert engine.version == "good"
    if change not in (nan, infinite):
        assert holds(engine, tensors(0))
        assert engine.paused is None
    else:
        assert engine.paused == "abort"  # it is mixed
    updater.readmit([engine], as_named_tensors(tensors(2).items(), mode), "again")
    assert holds(engine, tensors(2))
    assert (engine.version, engine.paused) == ("again", None)
    updater.close()


def test_equal_errors_of_engine_ranks_are_reported_once():
    message = r"\(toy\): rank 0, 1: ValueError: .*parameter for these tensors: 'x'; check the names [^:]*$"
    with pytest.raises(RuntimeError, match=message):
        WeightUpdater([ToyEngine(2)]).update([*tensors().items(), ("x", torch.zeros(2))], 1)


@pytest.mark.parametrize("mode", MODES)
def test_more_than_256_engine_ranks_are_refused(mode):
    small, large = ToyEngine(2), ToyEngine(1, "large")
    large.tp_size = 255
    updater = WeightUpdater([small, large])
    with pytest.raises(ValueError, match="one WeightUpdater supports at most 256 engine ranks, got 257; create"):
        updater.update(as_named_tensors(tensors().items(), mode), 1)
    assert updater.readmit([small], as_named_tensors(tensors().items(), mode), 1).verified
    assert small.calls == ["load, flush", "finish", "finish", "version 1", "resume"]
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_non_finite_values_are_sent_if_allowed(mode):
    engine = ToyEngine(2)
    checkpoint = tensors()
    nan(checkpoint)
    checkpoint["norm.weight"][0] = float("inf")
    updater = WeightUpdater([engine], bucket_bytes=300, allow_non_finite=True)
    assert updater.update(as_named_tensors(checkpoint.items(), mode), 1).verified
    assert holds(engine, checkpoint)
    updater.close()


def test_non_finite_values_are_not_looked_for_if_allowed(monkeypatch):
    """On a GPU they cannot be found in some dtypes."""

    def find(elements):
        raise AssertionError("looked for")

    monkeypatch.setattr(copier, "has_non_finite", find)
    with pytest.raises(AssertionError):
        WeightUpdater([ToyEngine()]).update(tensors().items(), 1)
    assert WeightUpdater([ToyEngine()], allow_non_finite=True).update(tensors().items(), 1).verified


class OddDtypesModel(ToyModel):
    """Model with parameters of dtypes whose non-finite values cannot be found on a GPU."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.waves = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.complex64), requires_grad=False)
        self.small = torch.nn.Parameter(torch.zeros(4, 6).to(torch.float8_e4m3fnuz), requires_grad=False)

    def load_one(self, name, tensor):
        if name in ("waves", "small"):
            getattr(self, name).data.copy_(tensor)
        else:
            super().load_one(name, tensor)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_any_dtype_is_sent_if_non_finite_values_are_allowed(device, mode):
    engine = ToyEngine(1, model=lambda rank, size: OddDtypesModel(rank, size).to(device))
    odd = {"waves": torch.randn(4, 6, dtype=torch.complex64), "small": torch.randn(4, 6).to(torch.float8_e4m3fnuz)}
    items = [(name, tensor.to(device)) for name, tensor in (tensors() | odd).items()]
    updater = WeightUpdater([engine], allow_non_finite=True, bucket_bytes=300)
    assert updater.update(as_named_tensors(items, mode), 1).verified
    for name, tensor in odd.items():
        held = engine.models[0].get_parameter(name).cpu()
        assert torch.equal(held.view(torch.uint8), tensor.view(torch.uint8))
    updater.close()


def test_overflow_in_cast_is_refused_as_non_finite():
    engine = ToyEngine()
    checkpoint = tensors()
    checkpoint[K][0, 0] = 1e30
    with pytest.raises(ValueError, match=f"NaN elements: '{K}'"):
        WeightUpdater([engine], dtype=torch.float16).update(checkpoint.items(), 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([], ValueError, "empty iterable"),
        ([*tensors().items(), (K, torch.zeros(2, 8))], ValueError, f"'{K}' was passed twice"),
        ([*tensors().items(), K], TypeError, r"\(name, tensor\) pairs"),
        ([(K, torch.zeros(2, 8).to_sparse())], TypeError, f"'{K}' must be dense"),
        ([(K, torch.zeros(2, 8, device="meta"))], TypeError, f"'{K}' must be dense and have data"),
    ],
)
def test_invalid_tensors_are_refused(items, error, message, mode):
    engine = ToyEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=300)
    updater.update(tensors(0).items(), "good")
    with pytest.raises(error, match=message):
        updater.update(as_named_tensors(items, mode), "bad")
    assert engine.version == "good"
    assert holds(engine, tensors(0))
    assert engine.paused is None
    assert updater.readmit([engine], as_named_tensors(tensors(1).items(), mode), "again").quarantined == {}
    assert holds(engine, tensors(1))
    updater.close()


@pytest.mark.parametrize("wrong", [None, lambda: None])
def test_what_returns_no_tensors_is_refused(wrong):
    updater = WeightUpdater([ToyEngine()])
    for call in (updater.declare, lambda tensors: updater.update(tensors, 1)):
        with pytest.raises(TypeError, match=r"a function that returns .*got None|returned None"):
            call(wrong)
    updater.close()


@pytest.mark.parametrize("error", [KeyError("lost"), KeyboardInterrupt()])
def test_function_whose_tensors_end_with_an_error_leaves_engines_paused(error):
    engines = [ToyEngine(2), ToyEngine(1)]
    updater = WeightUpdater(engines, bucket_bytes=100, timeout_s=30)

    updater.update(tensors(0).items(), "good")
    with pytest.raises(type(error)):
        updater.update(WithEvent(tensors(1).items(), 7, fail(error)), "bad")
    assert [(engine.version, engine.paused) for engine in engines] == [("good", "abort")] * 2
    with pytest.raises(RuntimeError, match=r"all engines are excluded .*readmit\(\).*the trainer failed while sending"):
        updater.update(tensors(2).items(), "again")
    assert updater.readmit(engines, tensors(2).items(), "again").quarantined == {}
    assert all(holds(engine, tensors(2)) and engine.paused is None for engine in engines)
    updater.close()


def test_tied_embeddings_are_optional():
    engine = ToyEngine(2)
    updater = WeightUpdater([engine])
    assert updater.update((tensors() | {TIED: torch.zeros(10, 8)}).items(), 1).verified
    assert updater.update(tensors().items(), 2).verified
    updater.close()


class IntegerModel(ToyModel):
    """Model with an integer parameter."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.counts = torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

    def load_one(self, name, tensor):
        if name == "counts":
            self.counts.data.copy_(tensor)
        else:
            super().load_one(name, tensor)


@pytest.mark.parametrize("mode", MODES)
def test_integers_are_sent_to_integer_parameters_only(mode):
    engine = ToyEngine(1, model=IntegerModel)
    updater = WeightUpdater([engine], dtype=torch.bfloat16)
    counts = torch.tensor([2**53 + 1, -1, 7])
    updater.update(as_named_tensors((tensors() | {"counts": counts}).items(), mode), 1)
    assert torch.equal(engine.models[0].counts, counts)
    with pytest.raises(
        RuntimeError, match=r"'counts' has the wrong dtype: it is cast from torch.bfloat16 to torch.int64"
    ):
        updater.update(as_named_tensors((tensors() | {"counts": counts.float()}).items(), mode), 2)
    updater.close()


class ScaledModel(ToyModel):
    """Model with a float8 parameter and its scale."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.small = torch.nn.Parameter(torch.zeros(4, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_one(self, name, tensor):
        if name in ("small", "scale"):
            getattr(self, name).data.copy_(tensor)
        else:
            super().load_one(name, tensor)


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_float8_values_are_sent_unchanged_to_float8_parameters_only(mode, dtype):
    engine = ToyEngine(1, model=ScaledModel)
    updater = WeightUpdater([engine], dtype=dtype)
    with pytest.raises(RuntimeError, match=rf"'{K}' has the wrong dtype: it is cast from torch.float8_e5m2"):
        updater.update(as_named_tensors((tensors() | {K: torch.zeros(2, 8).to(torch.float8_e5m2)}).items(), mode), 0)
    small, scale = torch.randn(4, 6).to(torch.float8_e4m3fn), torch.rand(4)
    stats = updater.readmit([engine], as_named_tensors((tensors() | {"small": small, "scale": scale}).items(), mode), 1)
    assert (stats.verified, stats.num_unverified) == (True, 0)
    assert torch.equal(engine.models[0].small.view(torch.uint8), small.view(torch.uint8))
    assert torch.equal(engine.models[0].scale, scale)
    updater.close()
