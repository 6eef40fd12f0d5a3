"""Copy tables, executed row by row and compared with their copies, for random shards."""

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tidemill_weight_update.copy.table import COLUMNS, Copy, CopyTable, Shard, build_tables
from tidemill_weight_update.tensors import Box, SourceSpec, contiguous_strides

F32, BF16 = torch.float32, torch.bfloat16


def strides_in_any_order(rng: random.Random, shape: Sequence[int], gap: int = 0) -> tuple[int, ...]:
    """Strides of a tensor with dims in random order in memory and up to `gap` elements between neighbors."""
    strides, step = [0] * len(shape), 1
    for dim in rng.sample(range(len(shape)), len(shape)) if gap else reversed(range(len(shape))):
        strides[dim] = step
        step *= shape[dim] + rng.randint(0, gap)
    return tuple(strides)


def end_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def cut(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a tensor of this shape."""
    edges = [sorted({0, n, *(rng.randint(0, n) for _ in range(rng.randint(0, 2)))}) for n in shape]
    ranges = [list(itertools.pairwise(edge)) for edge in edges]
    return [Box(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*ranges)]


class Case:
    """Random sources, their shards at random offsets of a few memories, and copies of random boxes.

    The value of each element is its position in the source, so that a copied value identifies its origin.
    """

    def __init__(self, seed: int, gap: int) -> None:
        rng = random.Random(seed)
        self.sources: list[SourceSpec] = []
        self.shards: dict[str, list[Shard]] = {}
        self.copies: list[Copy] = []
        self.targets = ["p", "q"]
        memories: list[list[int]] = [[], [], []]
        sizes = dict.fromkeys(self.targets, 0)
        for index in range(5):
            shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
            spec = SourceSpec(f"s{index}", shape, rng.choice([F32, BF16]))
            values = np.arange(math.prod(shape)).reshape(shape)
            self.sources.append(spec)
            self.shards[spec.name] = [self._stored(rng, box, values, memories, gap) for box in cut(rng, shape)]
            for _ in range(rng.randint(0, 3)):
                box = rng.choice(cut(rng, shape))
                name = rng.choice(self.targets)
                strides = strides_in_any_order(rng, box.shape, gap)
                self.copies.append(Copy(spec.name, box, name, sizes[name], strides, rng.choice([F32, BF16])))
                sizes[name] += end_of(box.shape, strides) + rng.randint(0, gap)
        self.memories = [np.array(memory) for memory in memories]
        self.blank = [np.full(sizes[name], -1) for name in self.targets]

    def _stored(self, rng: random.Random, box: Box, values: np.ndarray, memories: list[list[int]], gap: int) -> Shard:
        memory = rng.randrange(len(memories))
        block = memories[memory]
        block += [-7] * rng.randint(0, gap)
        strides, offset = strides_in_any_order(rng, box.shape, gap), len(block)
        block += [-7] * end_of(box.shape, strides)
        for index in itertools.product(*map(range, box.shape)):
            place = offset + sum(i * step for i, step in zip(index, strides, strict=True))
            block[place] = values[tuple(a + i for a, i in zip(box.start, index, strict=True))]
        return Shard(box, memory, offset, strides)

    def expected(self, dtypes: tuple[torch.dtype, torch.dtype]) -> list[np.ndarray]:
        """Content of the targets after the copies between these dtypes."""
        targets = [target.copy() for target in self.blank]
        spec_of = {spec.name: spec for spec in self.sources}
        for copy in self.copies:
            spec = spec_of[copy.name]
            for index in itertools.product(*map(range, copy.box.shape)) if (spec.dtype, copy.dtype) == dtypes else ():
                at = [a + i for a, i in zip(copy.box.start, index, strict=True)]
                place = copy.offset + sum(i * step for i, step in zip(index, copy.strides, strict=True))
                position = sum(i * step for i, step in zip(at, contiguous_strides(spec.shape), strict=True))
                targets[self.targets.index(copy.parameter)][place] = position
        return targets

    def run(self, table: CopyTable) -> list[np.ndarray]:
        """Execute the table; check that each element has the position that the table states."""
        targets = [target.copy() for target in self.blank]
        for entry in zip(*(getattr(table, name).tolist() for name in COLUMNS), strict=True):
            row = dict(zip(COLUMNS, entry, strict=True))
            for r in range(row["rows"]):
                src, dst = row["src"] + r * row["src_pitch"], row["dst"] + r * row["dst_pitch"]
                read = self.memories[row["memory"]][src : src + row["cols"]]
                pos = row["pos"] + r * row["pos_pitch"]
                assert read.tolist() == list(range(pos, pos + row["cols"]))
                assert (targets[row["target"]][dst : dst + row["cols"]] == -1).all()
                targets[row["target"]][dst : dst + row["cols"]] = read
        return targets


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("seed", range(60))
def test_table_does_its_copies_for_any_sharding(seed, gap):
    case = Case(seed, gap)
    tables = build_tables(case.copies, case.sources, case.shards, case.targets)
    dtype_of = {spec.name: spec.dtype for spec in case.sources}
    pairs = list(dict.fromkeys((dtype_of[copy.name], copy.dtype) for copy in case.copies))
    assert [(table.src_dtype, table.dst_dtype) for table in tables] == pairs
    for table, pair in zip(tables, pairs, strict=True):
        for got, want in zip(case.run(table), case.expected(pair), strict=True):
            assert got.tolist() == want.tolist()
        numel = sum(copy.box.numel for copy in case.copies if (dtype_of[copy.name], copy.dtype) == pair)
        assert (table.rows * table.cols).sum() == numel
        counts = np.bincount(table.tensor, weights=table.rows * table.cols, minlength=len(case.sources))
        for index, spec in enumerate(case.sources):
            copies = [copy for copy in case.copies if copy.name == spec.name and (spec.dtype, copy.dtype) == pair]
            assert counts[index] == sum(copy.box.numel for copy in copies)


def table_of(copy: Copy, shard: Shard, shape: tuple[int, ...]) -> list[dict[str, int]]:
    (table,) = build_tables([copy], [SourceSpec(copy.name, shape, F32)], {copy.name: [shard]}, [copy.parameter])
    return [
        dict(zip(COLUMNS, entry, strict=True))
        for entry in zip(*(getattr(table, name).tolist() for name in COLUMNS), strict=True)
    ]


def whole(shape: tuple[int, ...]) -> Shard:
    return Shard(Box.whole(shape), 0, 0, contiguous_strides(shape))


def test_contiguous_copy_is_one_row():
    for shape in [(), (7,), (4, 5), (2, 3, 4), (2, 1, 4)]:
        copy = Copy("s", Box.whole(shape), "p", 10, contiguous_strides(shape), F32)
        (row,) = table_of(copy, whole(shape), shape)
        assert (row["rows"], row["cols"], row["dst"]) == (1, math.prod(shape), 10)
        assert (row["src_pitch"], row["dst_pitch"], row["pos_pitch"]) == (0, 0, 0)


def test_slice_of_columns_is_one_two_dimensional_copy():
    copy = Copy("s", Box((0, 0, 2), (3, 4, 5)), "p", 0, (20, 5, 1), F32)
    (row,) = table_of(copy, whole((3, 4, 9)), (3, 4, 9))
    assert (row["rows"], row["cols"]) == (12, 5)
    assert (row["src"], row["src_pitch"], row["dst_pitch"], row["pos"], row["pos_pitch"]) == (2, 9, 5, 2, 9)


def test_longest_dim_becomes_the_rows():
    shape = (3, 100, 4)
    copy = Copy("s", Box.whole(shape), "p", 0, (2000, 10, 1), F32)
    rows = table_of(copy, whole(shape), shape)
    assert [(row["rows"], row["cols"], row["dst"]) for row in rows] == [(100, 4, 0), (100, 4, 2000), (100, 4, 4000)]


def test_transposed_copy_has_rows_of_one_element():
    copy = Copy("s", Box.whole((3, 5)), "p", 0, (1, 3), F32)
    rows = table_of(copy, whole((3, 5)), (3, 5))
    assert [(row["rows"], row["cols"], row["src"], row["dst"]) for row in rows] == [
        (5, 1, 0, 0),
        (5, 1, 5, 1),
        (5, 1, 10, 2),
    ]


COPY = Copy("s", Box((1, 0), (2, 3)), "p", 0, (3, 1), F32)
HALF = Shard(Box((0, 0), (2, 3)), 0, 0, (3, 1))


def test_what_no_shard_contains_is_skipped():
    (table,) = build_tables([COPY], [SourceSpec("s", (4, 3), F32)], {"s": [HALF]}, ["p"])
    assert (table.rows.tolist(), table.cols.tolist(), table.pos.tolist(), table.dst.tolist()) == ([1], [3], [3], [0])
    (table,) = build_tables([COPY], [SourceSpec("s", (4, 3), F32)], {}, ["p"])
    assert len(table) == 0


def test_no_copies_give_no_tables():
    assert build_tables([], [SourceSpec("s", (4, 3), F32)], {}, ["p"]) == ()


def test_table_of_a_large_model_has_one_row_per_shard():
    specs = [SourceSpec(f"s{i}", (768, 2048), BF16) for i in range(9435)]
    copies = [Copy(s.name, Box.whole(s.shape), "p", i * 768 * 2048, (2048, 1), BF16) for i, s in enumerate(specs)]
    quarters = [Shard(Box((192 * k, 0), (192, 2048)), k, 0, (2048, 1)) for k in range(4)]
    (table,) = build_tables(copies, specs, {spec.name: quarters for spec in specs}, ["p"])
    assert (len(table), (table.rows * table.cols).sum()) == (4 * 9435, 9435 * 768 * 2048)
