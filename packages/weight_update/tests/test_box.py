"""Boxes against sets of indices."""

import itertools
import random

import pytest
import torch
from tidemill_weight_update.plan.box import Box, contiguous_strides


def indices(box: Box | None) -> set[tuple[int, ...]]:
    if box is None:
        return set()
    return set(itertools.product(*(range(a, a + n) for a, n in zip(box.start, box.shape, strict=True))))


@pytest.mark.parametrize("num_dims", [0, 1, 2, 3])
def test_the_intersection_holds_the_indices_in_both(num_dims):
    rng = random.Random(num_dims)
    for _ in range(200):
        a, b = (
            Box(tuple(rng.randrange(4) for _ in range(num_dims)), tuple(rng.randrange(5) for _ in range(num_dims)))
            for _ in range(2)
        )
        common = a.intersect(b)
        assert indices(common) == indices(a) & indices(b)
        assert common == b.intersect(a)
        assert (common.numel if common else 0) == len(indices(a) & indices(b))


def test_the_whole_contains_every_box():
    whole = Box.whole((3, 4))
    assert (whole.start, whole.shape, whole.numel) == ((0, 0), (3, 4), 12)
    assert whole.intersect(Box((1, 2), (2, 2))) == Box((1, 2), (2, 2))
    assert Box.whole(()).numel == 1
    assert Box.whole(()).intersect(Box.whole(())) == Box((), ())


def test_boxes_of_different_dims_are_refused():
    with pytest.raises(ValueError, match="as many dims"):
        Box.whole((3,)).intersect(Box.whole((3, 1)))
    with pytest.raises(ValueError, match="same length"):
        Box((0,), (1, 2))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 1, 4)])
def test_contiguous_strides_are_torchs(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()
