"""A model that combines tensors of different modules, which a stream may bring apart."""

import pytest
import torch
from tidemill_weight_update import WeightUpdater
from torch import nn
from toy_engines import ToyEngine


class Joint(nn.Module):
    """Loads `left.a.weight` and `right.b.weight` into one parameter, if it is given both at once."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(8, 4), requires_grad=False)

    def load_weights(self, weights) -> None:
        known = dict(weights)
        if {"left.a.weight", "right.b.weight"} <= known.keys():
            self.both.data.copy_(torch.cat([known["left.a.weight"], known["right.b.weight"]]))


TENSORS = {"left.a.weight": torch.randn(4, 4), "right.b.weight": torch.randn(4, 4)}


def test_what_came_apart_is_an_error_and_not_skipped():
    engine = ToyEngine(1, model=Joint)
    updater = WeightUpdater([engine], bucket_bytes=64)
    with pytest.raises(RuntimeError, match=r"combines these tensors with others .*'left.a.weight', 'right.b.weight'"):
        updater.update(iter(TENSORS.items()), 1)
    assert engine.version != "1"


@pytest.mark.parametrize(("bucket_bytes", "streamed"), [(64, False), (1 << 20, True), (1 << 20, False)])
def test_what_came_together_is_combined(bucket_bytes, streamed):
    engine = ToyEngine(1, model=Joint)
    updater = WeightUpdater([engine], bucket_bytes=bucket_bytes)
    updater.update(iter(TENSORS.items()) if streamed else TENSORS.items(), 1)
    assert torch.equal(engine.models[0].both, torch.cat(list(TENSORS.values())))
