"""Tiles: each word of the copies is in one tile, and the number of tiles is close to the minimum."""

import random

import copy_tables
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tidemill_weight_update.copy.table import COLUMNS, CopyTable
from tidemill_weight_update.copy.tiles import cut

BF16, FP32 = torch.bfloat16, torch.float32
PAIRS = [(BF16, BF16), (torch.float8_e4m3fn, torch.float8_e4m3fn), (torch.int64, torch.int64), (FP32, BF16)]


def table(dtype, **columns):
    length = len(next(iter(columns.values())))
    zeros = {name: np.zeros(length, np.int64) for name in COLUMNS}
    return CopyTable(dtype, dtype, **zeros | {name: np.array(values) for name, values in columns.items()})


def cut_aligned(copies, tile_elements=4096):
    aligned = np.ones(1 + max(copies.memory, default=0), bool), np.ones(1 + max(copies.target, default=0), bool)
    return cut(copies, tile_elements, *aligned)


def words(dtype):
    """Words per element: elements of 8 bytes are two of 4."""
    return 2 if dtype.itemsize == 8 else 1


def words_of(group):
    """Tuples (tensor, memory, byte read, target, byte written, byte in the source) of every word of every tile."""
    src_bytes, dst_bytes = (dtype.itemsize // words(dtype) for dtype in (group.src_dtype, group.dst_dtype))
    height, width = group.shape
    found = []
    for tile, index in enumerate(group.tile_segment):
        s = dict(zip((*COLUMNS, "first_tile", "tiles_across"), group.segments[index].tolist(), strict=False))
        down, across = divmod(tile - s["first_tile"], s["tiles_across"])
        rows = np.arange(down * height, min((down + 1) * height, s["rows"]))[:, None]
        cols = np.arange(across * width, min((across + 1) * width, s["cols"] * group.unit))[None]
        assert rows.size
        assert cols.size
        read = (s["src"] + rows * s["src_pitch"]) * group.unit + cols
        written = (s["dst"] + rows * s["dst_pitch"]) * group.unit + cols
        position = s["pos"] + rows * s["pos_pitch"] + cols
        for part in range(group.packed):  # words per index
            ends = [number * group.packed + part for number in (read, written, position)]
            columns = [
                s["tensor"],
                s["memory"],
                ends[0] * src_bytes,
                s["target"],
                ends[1] * dst_bytes,
                ends[2] * src_bytes,
            ]
            found += zip(*(np.broadcast_to(column, read.shape).ravel().tolist() for column in columns), strict=True)
    return found


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_tiles_contain_each_word_of_the_copies_once(pair, align):
    case = copy_tables.random_copies(align, *pair, align, max_cols=9000)
    groups = cut_aligned(case.table)
    assert len({group.shape for group in groups}) > 2
    assert align == 1 or all(group.unit > 1 for group in groups)
    check_words(case, groups)


def check_words(case, groups):
    """Check that the tiles contain each word of the copies once."""
    got = [place for group in groups for place in words_of(group)]
    pair = case.table.src_dtype, case.table.dst_dtype
    src_bytes, dst_bytes = (dtype.itemsize for dtype in pair)
    wanted = set()
    for row in case.rows:
        for r in range(row["rows"]):
            read, written, position = (row[at] + r * row[f"{at}_pitch"] for at in ("src", "dst", "pos"))
            src_words = range(0, row["cols"] * src_bytes, src_bytes // words(pair[0]))
            dst_words = range(0, row["cols"] * dst_bytes, dst_bytes // words(pair[1]))
            for a, b in zip(src_words, dst_words, strict=True):
                ends = read * src_bytes + a, row["target"], written * dst_bytes + b, position * src_bytes + a
                wanted.add((row["tensor"], row["memory"], *ends))
    assert len(got) == len(wanted)
    assert set(got) == wanted


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_tiles_of_folded_rows_contain_each_word_once(pair, data):
    align = data.draw(st.sampled_from([1, 2, 16]), "align")
    rows, fold = data.draw(st.sampled_from([(60, 32), (28, 128), (7, 512)]), "short rows, columns of folded rows")
    whole = st.tuples(st.just(1), st.sampled_from([fold, 4 * fold]), st.sampled_from([0, 0, 0, align]))
    part = st.tuples(st.sampled_from([0, rows]), st.integers(0, 24 // align).map(lambda n: n * align), st.just(0))
    shapes = data.draw(st.lists(whole | part, min_size=1, max_size=5), "rows, cols, and how many more")
    shapes += [(rows, 16, 0), (1, 4 * fold, 0)]
    rng = random.Random(data.draw(st.integers(0, 99), "seed of the offsets"))
    case = copy_tables.copies_of_shapes(rng, [(rows, cols + more) for rows, cols, more in shapes], *pair, align)
    check_words(case, cut_aligned(case.table))


@pytest.mark.parametrize(
    ("rows", "cols", "shape", "num_tiles"),
    [
        (1, 1, (1, 4096), 1),
        (1, 1 << 20, (1, 4096), 1 << 7),
        (64, 8192, (1, 4096), 64),
        (4096, 1024, (8, 512), 512),
        (4096, 768, (32, 128), 384),
        (4096, 192, (128, 32), 96),
    ],
)
def test_tiles_are_wide_unless_threads_would_idle(rows, cols, shape, num_tiles):
    (group,) = cut_aligned(table(BF16, rows=[rows], cols=[cols], src_pitch=[8192], dst_pitch=[8192]))
    assert group.shape == shape
    assert len(group.tile_segment) == num_tiles


def test_unaligned_copies_get_their_own_group():
    cols = [64, 64, 64, 63, 64, 64]
    src, dst, pos = [0, 8, 4, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0, 8, 0, 0, 0, 2]
    columns = {"rows": [1] * 6, "cols": cols, "src": src, "dst": dst, "pos": pos, "tensor": list(range(6))}
    groups = {group.unit: group for group in cut_aligned(table(BF16, **columns))}
    tensor = COLUMNS.index("tensor")
    assert groups[4].segments[:, tensor].tolist() == [0, 1]
    assert groups[1].segments[:, tensor].tolist() == [2, 3, 4, 5]


def test_unaligned_block_affects_its_own_copies_only():
    case = table(BF16, rows=[1] * 3, cols=[64] * 3, memory=[0, 1, 0], target=[0, 0, 1], tensor=[0, 1, 2])
    groups = {g.unit: g for g in cut(case, 4096, np.array([True, False]), np.array([True, False]))}
    tensor = COLUMNS.index("tensor")
    assert groups[4].segments[:, tensor].tolist() == [0]
    assert groups[1].segments[:, tensor].tolist() == [1, 2]


def test_tiles_of_a_large_model_take_little_memory():
    sizes = np.array([768 * 2048] * 9216 + [2048] * 200 + [151936 * 2048] * 2)
    (group,) = cut_aligned(table(BF16, rows=np.ones_like(sizes), cols=sizes))
    assert sizes.sum() * 2 > 30e9
    assert group.segments.nbytes + group.tile_segment.nbytes < 16 << 20


def test_long_and_short_rows_share_one_launch():
    """In two launches the short rows, which are read from other GPUs, would start after the long ones."""
    parts = {"rows": [1, 512, 1, 512], "cols": [8192 * 64, 192, 8192 * 32, 192], "src_pitch": [0, 768, 0, 768]}
    (group,) = cut_aligned(table(BF16, **parts, dst_pitch=[0, 192] * 2, tensor=[0, 1, 2, 3]))
    assert group.shape == (128, 32)
    assert len(group.tile_segment) == 64 + 12 + 32 + 12
    tensor = COLUMNS.index("tensor")
    assert group.segments[:, tensor].tolist() == [0, 1, 2, 3]
    odd = parts | {"cols": [8192 * 64 + 8, 192, 8192 * 32, 192]}  # has a remainder when folded
    assert len(cut_aligned(table(BF16, **odd, dst_pitch=[0, 192] * 2))) == 2
