"""Reordering of copies from several GPUs, so that all GPUs are read evenly."""

import random

import copy_tables
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tidemill_weight_update.copy import tiles
from tidemill_weight_update.copy.copier import Copier
from tidemill_weight_update.copy.table import COLUMNS, CopyTable
from tidemill_weight_update.copy.tiles import PIECE_ELEMENTS, interleave

BF16 = torch.bfloat16


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_reordered_table_does_the_same_copies(data):
    rows_and_cols = st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 5, 64, 200])) | st.tuples(
        st.just(1), st.integers(0, 600)
    )
    shapes = data.draw(st.lists(rows_and_cols, max_size=6), "rows, cols")
    rng = random.Random(data.draw(st.integers(0, 99), "seed of the offsets"))
    case = copy_tables.copies_of_shapes(rng, shapes, BF16, torch.float32, align=1)
    origin = np.array(data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3), "origins"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "PIECE_ELEMENTS", 64)
        patch.setattr(tiles, "_ROWS", 4)
        table = interleave(case.table, origin)
    memories, targets = case.memories(0), case.targets()
    wanted, checksums, counts = case.expected(memories, "source")
    got = torch.zeros_like(checksums), torch.zeros_like(counts)
    Copier([table], torch.device("cpu")).run(memories, targets, *got)
    assert all(torch.equal(target, want) for target, want in zip(targets, wanted, strict=True))
    assert torch.equal(got[0], checksums)
    assert torch.equal(got[1], counts)
    assert (table.rows * table.cols).sum() == (case.table.rows * case.table.cols).sum()


def layers(num_layers):
    """Table that reads, layer by layer, whole rows of one GPU and parts of rows of two others."""
    zeros = {name: np.zeros(3 * num_layers, np.int64) for name in COLUMNS}
    rows, cols = [1, 4096, 4096], [100 << 20, 2048, 1024]
    return CopyTable(
        BF16,
        BF16,
        **zeros
        | {"rows": np.tile(rows, num_layers), "cols": np.tile(cols, num_layers)}
        | {"memory": np.tile([0, 1, 2], num_layers), "src_pitch": np.tile([0, 4096, 4096], num_layers)},
    )


def test_reads_from_all_gpus_progress_evenly():
    table = interleave(layers(4), np.array([5, 3, 9]))
    sizes = table.rows * table.cols
    assert sizes.max() <= PIECE_ELEMENTS
    done = np.stack([np.where(table.memory == memory, sizes, 0).cumsum() for memory in range(3)])
    shares = done / done[:, -1:]
    assert np.ptp(shares, axis=0).max() <= 1.01 * (PIECE_ELEMENTS / done[:, -1]).max()


def test_table_of_one_gpu_is_not_reordered():
    table = layers(4)
    assert interleave(table, np.array([7, 7, 7])) is table
