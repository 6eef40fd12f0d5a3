"""Copies in host memory, compared with copying row by row."""

import gc
import weakref

import copy_tables
import numpy as np
import pytest
import torch
from tidemill_weight_update.copy.checksum import checksum_rows
from tidemill_weight_update.copy.copier import Copier
from tidemill_weight_update.copy.table import COLUMNS, CopyTable

CPU = torch.device("cpu")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PAIRS = [(d, d) for d in (BF16, FP16, FP32, FP64, torch.int64, torch.uint8, torch.float8_e4m3fn)]
PAIRS += [(FP32, BF16), (BF16, FP32), (FP32, FP16), (FP16, BF16)]


def one_row(dtype, **columns):
    row = {"tensor": 0, "memory": 0, "target": 0, "rows": 1, "src_pitch": 0, "dst_pitch": 0, "pos": 0, "pos_pitch": 0}
    row |= {"src": 0, "dst": 0} | columns
    return CopyTable(src_dtype=dtype, dst_dtype=dtype, **{name: np.array([row[name]]) for name in COLUMNS})


@pytest.mark.parametrize("checksum_of", ["source", "target"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_copies_casts_checksums_and_non_finite_tensors(pair, checksum_of):
    for seed in range(3):
        case = copy_tables.random_copies(seed, *pair, align=1 if seed else 8)
        memories = case.memories(seed)
        wanted, checksums, non_finite = case.expected(memories, checksum_of)
        targets = case.targets()
        got = torch.zeros_like(checksums), torch.zeros_like(non_finite)
        Copier([case.table], CPU, checksum_of).run(memories, targets, *got)
        assert all(torch.equal(target, want) for target, want in zip(targets, wanted, strict=True))
        assert torch.equal(got[0], checksums)
        assert torch.equal(got[1], non_finite)


def test_checksums_without_copy_are_those_of_the_copy():
    case = copy_tables.random_copies(0, FP32, BF16)
    memories = case.memories(0)
    _, checksums, non_finite = case.expected(memories, "target")
    got = torch.zeros_like(checksums), torch.zeros_like(non_finite)
    Copier([case.table], CPU, "target").run(memories, [], *got)
    assert torch.equal(got[0], checksums)
    assert torch.equal(got[1], non_finite)


def test_tables_share_memories_targets_and_checksums():
    case = copy_tables.random_copies(5, BF16, BF16)
    halves = [slice(0, 15), slice(15, None)]
    tables = [CopyTable(BF16, BF16, **{name: getattr(case.table, name)[half] for name in COLUMNS}) for half in halves]
    memories, targets = case.memories(0), case.targets()
    wanted, checksums, _ = case.expected(memories, "source")
    got = torch.zeros_like(checksums)
    Copier(tables, CPU).run(memories, targets, got)
    assert all(torch.equal(target, want) for target, want in zip(targets, wanted, strict=True))
    assert torch.equal(got, checksums)


@pytest.mark.parametrize("keeps", [False, True])
def test_copier_follows_the_blocks_of_each_run(keeps):
    case = copy_tables.random_copies(1, BF16, BF16)
    copier = Copier([case.table], CPU, keeps=keeps)
    slots = [(case.memories(seed), case.targets()) for seed in range(3)]
    for slot in (0, 1, 1, 0, 2):
        memories, targets = slots[slot]
        memories[0] += 1
        copier.run(memories, targets)
        wanted, _, _ = case.expected(memories, "source")
        assert all(torch.equal(target, want) for target, want in zip(targets, wanted, strict=True))


def test_copier_keeps_no_block_alive_unless_asked():
    case = copy_tables.random_copies(1, BF16, BF16)

    def run(copier):
        arrays = [memory.numpy() for memory in case.memories(0)]
        copier.run([torch.from_numpy(array) for array in arrays], case.targets())
        return [weakref.ref(array) for array in arrays]

    copiers = [Copier([case.table], CPU, keeps=keeps) for keeps in (False, True)]
    alive = [run(copier) for copier in copiers]
    gc.collect()
    assert [any(ref() is not None for ref in refs) for refs in alive] == [False, True]


def test_offsets_in_a_transposed_target_ignore_its_strides():
    storage = torch.zeros(100, dtype=BF16)
    source = torch.randn(12).to(BF16)
    target = storage[10:34].view(6, 4).t()  # as a parameter that its loader stores transposed
    Copier([one_row(BF16, dst=3, cols=12)], CPU).run([source], [target])
    assert torch.equal(storage[13:25], source)
    assert torch.count_nonzero(storage) == 12


def test_parameter_with_requires_grad_is_written():
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    source = torch.randn(24)
    checksums = torch.zeros(1, dtype=torch.int64)
    Copier([one_row(FP32, cols=24)], CPU).run([source.requires_grad_()], [parameter], checksums)
    assert torch.equal(parameter.detach().flatten(), source.detach())
    assert checksums[0] == checksum_rows(source[None], 0, 0)


@pytest.mark.parametrize(
    "columns", [{"cols": 25}, {"cols": 4, "src": -1}, {"cols": 4, "rows": 4, "src_pitch": 7}, {"cols": 4, "dst": 21}]
)
def test_copies_outside_a_block_are_refused(columns):
    with pytest.raises(RuntimeError, match=r"out of bounds|invalid storage offset"):
        Copier([one_row(BF16, **columns)], CPU).run([torch.zeros(24, dtype=BF16)], [torch.zeros(24, dtype=BF16)])


def test_blocks_not_aligned_to_the_dtype_are_refused():
    with pytest.raises(AssertionError, match=r"a block of torch\.float32 starts at byte 2 of its storage"):
        Copier([one_row(FP32, cols=1)], CPU).run([torch.zeros(16, dtype=torch.uint8)[2:]], [torch.zeros(4)])


def test_alignment_is_checked_per_dtype_of_the_own_copies():
    """As a flat bfloat16 buffer after an odd number of elements, beside float32."""
    halves, singles = torch.randn(9).to(BF16), torch.randn(4)
    parameters = torch.zeros(9, dtype=BF16), torch.zeros(4)
    tables = [one_row(BF16, cols=8), one_row(FP32, memory=1, target=1, cols=4)]
    Copier(tables, CPU).run([halves[1:], singles], [parameters[0][1:], parameters[1]])
    assert torch.equal(parameters[0][1:], halves[1:])
    assert torch.equal(parameters[1], singles)
