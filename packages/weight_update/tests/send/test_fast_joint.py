"""A model that combines tensors of different modules, which a stream may send in separate buckets."""

import pytest
import torch
from tidemill_weight_update import WeightUpdater
from torch import nn
from toy_engines import ToyEngine


class CombiningModel(nn.Module):
    """Model that loads `left.a.weight` and `right.b.weight` into one parameter, if both are passed in one call."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(8, 4), requires_grad=False)

    def load_weights(self, weights) -> None:
        known = dict(weights)
        if {"left.a.weight", "right.b.weight"} <= known.keys():
            self.both.data.copy_(torch.cat([known["left.a.weight"], known["right.b.weight"]]))


TENSORS = {"left.a.weight": torch.randn(4, 4), "right.b.weight": torch.randn(4, 4)}


def test_combined_tensors_in_separate_buckets_of_a_stream_are_an_error():
    engine = ToyEngine(1, model=CombiningModel)
    updater = WeightUpdater([engine], bucket_bytes=64)
    with pytest.raises(RuntimeError, match=r"combines these tensors with others .*'left.a.weight', 'right.b.weight'"):
        updater.update(iter(TENSORS.items()), 1)
    assert engine.version != "1"


@pytest.mark.parametrize(("bucket_bytes", "streamed"), [(64, False), (1 << 20, True), (1 << 20, False)])
def test_tensors_of_one_bucket_or_collection_are_combined(bucket_bytes, streamed):
    engine = ToyEngine(1, model=CombiningModel)
    updater = WeightUpdater([engine], bucket_bytes=bucket_bytes)
    updater.update(iter(TENSORS.items()) if streamed else TENSORS.items(), 1)
    assert torch.equal(engine.models[0].both, torch.cat(list(TENSORS.values())))
