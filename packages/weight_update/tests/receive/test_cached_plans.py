"""What an engine rank caches between updates belongs to one plan, also after updates that failed."""

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.receive.receiver import Receiver
from torch import Tensor, nn
from toy_engines import ToyEngine, holds, tensors


def items_that_fail(items: Mapping[str, Tensor], after: int) -> Iterator[tuple[str, Tensor]]:
    """Yield `after` tensors, then fail as a trainer would."""
    for count, item in enumerate(items.items()):
        if count == after:
            raise RuntimeError("the trainer failed")
        yield item


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


@pytest.mark.parametrize("streamed", [False, True])
def test_copy_tables_are_kept_as_long_as_their_plan(streamed):
    engine = ToyEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=100)
    kept = []
    for version in range(4):
        items = tensors(version).items()
        updater.update(iter(items) if streamed else items, version)
        assert holds(engine, tensors(version))
        kept.append(
            [bucket_copies for receiver in engine.receivers for bucket_copies in receiver._bucket_copies.values()]
        )
    assert len(kept[1]) > 20
    assert kept[1] == kept[2] == kept[3]  # the same objects; the first plan of a stream covers one part only
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
        updater.update(iter([("plain", torch.zeros(5, 4))]), 2)
    for version in (3, 4):
        stats = updater.update(checkpoint(version).items(), version)
        assert (stats.through_loader, stats.num_unverified) == (first.through_loader, 1)
        assert holds(engine, checkpoint(version))
    updater.close()


def test_complete_update_works_after_a_failed_stream_of_another_dtype():
    engine = ToyEngine(1)
    updater = WeightUpdater([engine], bucket_bytes=100)
    updater.update(tensors(0).items(), 0)
    with pytest.raises(RuntimeError, match="the trainer failed"):
        updater.update(items_that_fail(tensors(1, torch.bfloat16), after=5), 1)
    assert updater.readmit([engine], tensors(2).items(), 2).verified  # excluded if it had loaded a bucket
    assert holds(engine, tensors(2))
    assert updater.update(tensors(3).items(), 3).verified
    assert holds(engine, tensors(3))
    updater.close()


class LosesTrainerRank(Receiver):
    """Receiver that fails once after the last tensor, as if a trainer rank had exited."""

    loses_rank = False

    def manifest(self, keys):
        if self.loses_rank:
            self.loses_rank = False
            raise RuntimeError("trainer rank 1 (process 1) has ended")
        return super().manifest(keys)


def test_missing_tensor_is_reported_after_a_stream_that_failed_at_its_end():
    engine = ToyEngine(1, receiver=LosesTrainerRank)
    updater = WeightUpdater([engine], bucket_bytes=100)
    lacking = {name: tensor for name, tensor in tensors().items() if name != "norm.weight"}
    engine.receivers[0].loses_rank = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="trainer rank 1"):
        updater.update(iter(lacking.items()), 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no tensor was sent for these parameters of the engine: 'norm'"):
            updater.readmit([engine], lacking.items(), 1)
    assert updater.readmit([engine], tensors().items(), 1).verified
    assert holds(engine, tensors())
    updater.close()


def load_concatenated(parameters: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    if {"left.a", "right.b"} <= given.keys():
        parameters["both"][:8].copy_(torch.cat([given["left.a"], given["right.b"]]))
        parameters["both"][8:].zero_()


def test_tensors_are_combined_in_a_complete_update_after_a_failed_stream():
    engine = ToyEngine(1, model=model(load_concatenated, both=(10, 4)))
    checkpoint = {"left.a": torch.randn(4, 4), "right.b": torch.randn(4, 4)}
    updater = WeightUpdater([engine], bucket_bytes=64)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"combines these tensors with others .* pass a collection"):
            updater.readmit([engine], iter(checkpoint.items()), 1)
    assert updater.readmit([engine], checkpoint.items(), 1).verified
    assert holds(engine, checkpoint)  # including the padding
    updater.close()


def load_overlapping(parameters: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name, tensor in given.items():
        if name == "below.whole":
            parameters["p"].copy_(tensor * 2)
        else:
            parameters["p"][:2].copy_(tensor)


def test_tensor_after_a_loader_tensor_of_the_same_parameter_keeps_its_order():
    """`above.part` alone is a copy, but it must be loaded after `below.whole`, which needs the loader."""
    make = model(load_overlapping, p=(4, 4))
    checkpoint = {"below.whole": torch.randn(4, 4), "above.part": torch.randn(2, 4)}
    engine = ToyEngine(1, model=make)
    updater = WeightUpdater([engine], bucket_bytes=64)
    with pytest.raises(RuntimeError, match=r"combines these tensors with others .*'above.part'; pass a collection"):
        updater.update(iter(checkpoint.items()), 1)
    stats = updater.readmit([engine], checkpoint.items(), 1)
    assert (list(stats.through_loader), stats.num_unverified) == (list(checkpoint), 2)
    assert holds(engine, checkpoint)
    updater.close()
