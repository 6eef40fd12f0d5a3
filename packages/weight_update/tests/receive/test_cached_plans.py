"""What an engine rank caches between updates belongs to one plan, also after updates that failed."""

from collections.abc import Callable, Mapping

import pytest
import torch
from tidemill_weight_update import WeightUpdater
from torch import Tensor, nn
from toy_engines import MODES, ToyEngine, as_mode, holds, tensors


def model(load: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None], **shapes: tuple[int, ...]):
    """Make a model class whose `load_weights` calls `load(parameters, sources)` once with all sources."""

    class Model(nn.Module):
        def __init__(self, *_: int) -> None:
            super().__init__()
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.full(shape, 7.0), requires_grad=False))

        def load_weights(self, weights) -> None:
            load({name: parameter.data for name, parameter in self.named_parameters()}, dict(weights))

    return Model


@pytest.mark.parametrize("mode", MODES)
def test_copies_are_kept_as_long_as_their_plan(mode):
    engine = ToyEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=100)
    kept = []
    for version in range(3):
        updater.update(as_mode(tensors(version), mode), version)
        assert holds(engine, tensors(version))
        kept.append([copies for receiver in engine.receivers for copies in receiver._copies.all])
    assert len(kept[0]) > 20
    assert kept[0] == kept[1] == kept[2]  # the same objects
    updater.close()


def load_scaled(parameters: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name, tensor in given.items():
        parameters[name].copy_(tensor * 2 if name == "scaled" else tensor)


def test_loader_tensors_still_go_through_loader_after_a_refused_update():
    engine = ToyEngine(1, model=model(load_scaled, plain=(4, 4), scaled=(4, 4)))
    updater = WeightUpdater([engine])

    def checkpoint(value: int) -> dict[str, Tensor]:
        return {name: torch.full((4, 4), float(value)) for name in ("plain", "scaled")}

    first = updater.update(checkpoint(1).items(), 1)
    assert list(first.through_loader) == ["scaled"]
    with pytest.raises(RuntimeError, match=r"load_weights failed .* must match the existing size \(5\)"):
        updater.update([("plain", torch.zeros(5, 4))], 2)
    for version in (3, 4):
        stats = updater.update(checkpoint(version).items(), version)
        assert (stats.through_loader, stats.num_unverified) == (first.through_loader, 1)
        assert holds(engine, checkpoint(version))
    updater.close()


def load_concatenated(parameters: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    if {"left.a", "right.b"} <= given.keys():
        parameters["both"][:8].copy_(torch.cat([given["left.a"], given["right.b"]]))
        parameters["both"][8:].zero_()


@pytest.mark.parametrize("mode", MODES)
def test_tensors_of_different_buckets_are_combined(mode):
    engine = ToyEngine(1, model=model(load_concatenated, both=(10, 4)))
    checkpoint = {"left.a": torch.randn(4, 4), "right.b": torch.randn(4, 4)}
    updater = WeightUpdater([engine], bucket_bytes=64)
    stats = updater.update(as_mode(checkpoint, mode), 1)
    assert (stats.verified, stats.num_buckets) == (True, 2)
    assert holds(engine, checkpoint)  # including the padding
    updater.close()


def load_overlapping(parameters: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name, tensor in given.items():
        if name == "below.whole":
            parameters["p"].copy_(tensor * 2)
        else:
            parameters["p"][:2].copy_(tensor)


@pytest.mark.parametrize("mode", MODES)
def test_tensor_after_a_loader_tensor_of_the_same_parameter_keeps_its_order(mode):
    """`above.part` alone is a copy, but it must be loaded after `below.whole`, which needs the loader."""
    make = model(load_overlapping, p=(4, 4))
    checkpoint = {"below.whole": torch.randn(4, 4), "above.part": torch.randn(2, 4)}
    engine = ToyEngine(1, model=make)
    updater = WeightUpdater([engine], bucket_bytes=64)
    stats = updater.update(as_mode(checkpoint, mode), 1)
    assert (list(stats.through_loader), stats.num_unverified) == (list(checkpoint), 2)
    assert holds(engine, checkpoint)
    updater.close()
