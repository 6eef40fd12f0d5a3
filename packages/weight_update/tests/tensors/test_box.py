"""Boxes, compared with sets of indices."""

import itertools
import random

import pytest
import torch
from tidemill_weight_update.tensors import Box, are_disjoint, contiguous_strides


def indices(box: Box | None) -> set[tuple[int, ...]]:
    if box is None:
        return set()
    return set(itertools.product(*(range(a, a + n) for a, n in zip(box.start, box.shape, strict=True))))


@pytest.mark.parametrize("num_dims", [0, 1, 2, 3])
def test_intersection_contains_indices_in_both_boxes(num_dims):
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


@pytest.mark.parametrize("num_dims", [0, 1, 2, 3])
def test_boxes_are_disjoint_if_no_index_is_shared(num_dims):
    rng = random.Random(num_dims)
    seen = set()
    for _ in range(500):
        boxes = [
            Box(tuple(rng.randrange(9) for _ in range(num_dims)), tuple(rng.randrange(4) for _ in range(num_dims)))
            for _ in range(rng.randrange(5))
        ]
        held = [indices(box) for box in boxes]
        seen.add(are_disjoint(boxes))
        assert are_disjoint(boxes) == (sum(map(len, held)) == len(set().union(*held)))
    assert seen == {True, False}


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_along_one_dim_are_compared_with_neighbours_only(dim, monkeypatch):
    compared = []
    intersect = Box.intersect
    monkeypatch.setattr(Box, "intersect", lambda a, b: (compared.append(1), intersect(a, b))[1])
    boxes = [Box((3 * i, 0) if dim == 0 else (0, 3 * i), (3, 5) if dim == 0 else (5, 3)) for i in range(256)]
    random.Random(0).shuffle(boxes)
    assert are_disjoint(boxes)
    assert len(compared) <= 256
    assert not are_disjoint([*boxes, Box((4, 4), (1, 1))])


def test_whole_box_contains_every_box():
    whole = Box.whole((3, 4))
    assert (whole.start, whole.shape, whole.numel) == ((0, 0), (3, 4), 12)
    assert whole.intersect(Box((1, 2), (2, 2))) == Box((1, 2), (2, 2))
    assert Box.whole(()).numel == 1
    assert Box.whole(()).intersect(Box.whole(())) == Box((), ())


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 1, 4)])
def test_contiguous_strides_match_torch(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()
