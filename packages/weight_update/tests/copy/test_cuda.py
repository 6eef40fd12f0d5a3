"""The copy kernel, compared bit for bit with copying row by row: on a GPU, and in Triton's interpreter on any machine.

`test_kernel_tests_pass_in_the_triton_interpreter` runs this file again in a process that interprets kernels. There the
device is the CPU, and addresses are host addresses.
"""

import os
from dataclasses import replace

import copy_tables
import numpy as np
import pytest
import torch
from tidemill_testing.interpreter import run_in_interpreter
from tidemill_weight_update.copy.checksum import checksum_rows
from tidemill_weight_update.copy.table import COLUMNS, CopyTable
from tidemill_weight_update.copy.tiles import cut

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8, INT64, UINT8 = torch.float8_e4m3fn, torch.int64, torch.uint8
SAME = [BF16, FP16, FP32, FP64, FP8, torch.float8_e5m2, INT64, UINT8]
CASTS = [(FP32, BF16), (BF16, FP32), (FP32, FP16), (FP16, FP32), (FP16, BF16), (BF16, FP16)]
# Dtypes; number of short rows that makes long rows fold; columns of a folded row.
FOLDED = [((BF16, BF16), 120, 32), ((FP8, FP8), 30, 128), ((FP32, FP32), 8, 512), ((FP64, FP64), 120, 32)]
FOLDED += [((FP32, BF16), 30, 128), ((BF16, FP32), 120, 32)]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
# The interpreter is slow. It also truncates where torch and a GPU round to bfloat16, and loses subnormal numbers.
SIZE = {"num_copies": 6, "max_cols": 1500, "max_rows": 20} if INTERPRETED else {"max_cols": 3000, "max_rows": 60}
on_device = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device")


def run(case, memories, checksum_of="source", *, write=True, sums=True, skew=0, far=0):
    """Run the table once; return targets, checksums and which tensors have non-finite elements.

    Args:
        skew: bytes between the start of every block and a multiple of 512.
        far: elements added to all offsets, and subtracted from the addresses of the blocks.
    """
    from tidemill_weight_update.copy.cuda import CudaCopier

    def with_skew(block):
        room = torch.empty(block.numel() + 1024, dtype=torch.uint8, device=DEVICE)
        start = -room.data_ptr() % 512 + skew
        return room[start : start + block.numel()].copy_(block)

    sources, targets = [with_skew(memory) for memory in memories], [with_skew(target) for target in case.targets()]
    checksums = torch.zeros(7, dtype=torch.int64, device=DEVICE) if sums else None
    non_finite = torch.zeros(7, dtype=torch.int32, device=DEVICE) if sums else None
    table = replace(case.table, src=case.table.src + far, dst=case.table.dst + far)
    copier = CudaCopier([table], DEVICE, checksum_of)
    addresses = [
        [block.data_ptr() - far * dtype.itemsize for block in blocks]
        for blocks, dtype in ((sources, table.src_dtype), (targets, table.dst_dtype))
    ]
    copier.run(addresses[0], addresses[1] if write else [], checksums, non_finite)
    return [target.cpu() for target in targets], checksums, non_finite


def assert_equal(got, wanted):
    for blocks in zip(got[0], wanted[0], strict=True):
        assert torch.equal(*blocks)
    if got[1] is not None:
        assert torch.equal(got[1].cpu(), wanted[1])
        assert torch.equal(got[2].cpu(), wanted[2])


@pytest.mark.gpu
@on_device
class TestKernel:
    @pytest.mark.parametrize("align", [1, 16])
    @pytest.mark.parametrize("dtype", SAME, ids=str)
    def test_copies_checksums_and_non_finite_tensors(self, dtype, align):
        case = copy_tables.random_copies(align, dtype, dtype, align, **SIZE)
        memories = case.memories(1)
        assert_equal(run(case, memories), case.expected(memories, "source"))

    @pytest.mark.parametrize("checksum_of", ["source", "target"])
    @pytest.mark.parametrize("align", [1, 16])
    @pytest.mark.parametrize("pair", CASTS, ids=str)
    def test_casts_match_torch(self, pair, align, checksum_of):
        case = copy_tables.random_copies(align, *pair, align, **SIZE)
        memories = case.memories(1, exact=INTERPRETED)
        assert_equal(run(case, memories, checksum_of), case.expected(memories, checksum_of))

    @pytest.mark.parametrize(
        ("cols", "rows", "shape"),
        [(192, 150, (128, 32)), (256, 100, (32, 128)), (1024, 20, (8, 512)), (8192, 4, (1, 4096))],
    )
    def test_every_tile_shape_is_copied(self, cols, rows, shape):
        case = copy_tables.random_copies(cols, BF16, BF16, align=cols, num_copies=10, max_rows=rows, max_cols=cols)
        ones = np.ones(3, bool)
        assert shape in {group.shape for group in cut(case.table, 4096, ones, ones)}
        memories = case.memories(1)
        assert_equal(run(case, memories), case.expected(memories, "source"))

    @pytest.mark.parametrize("pair", [(BF16, BF16), (FP32, BF16)], ids=str)
    def test_copy_without_checksums_and_checksums_without_copy(self, pair):
        case = copy_tables.random_copies(3, *pair, align=16, **SIZE)
        memories = case.memories(1, exact=INTERPRETED)
        wanted, checksums, non_finite = case.expected(memories, "target")
        assert_equal(run(case, memories, sums=False), (wanted, None, None))
        assert_equal(run(case, memories, "target", write=False), (case.targets(), checksums, non_finite))

    @pytest.mark.parametrize("align", [1, 16])
    @pytest.mark.parametrize(("pair", "part_rows", "cols"), FOLDED, ids=str)
    def test_long_rows_are_folded_beside_short_rows(self, pair, part_rows, cols, align):
        packed = 4 // min(pair[0].itemsize, 4) if pair[0] == pair[1] and align > 1 else 1
        skew = 0 if align > 1 else min(4, max(dtype.itemsize for dtype in pair))  # no block is aligned by chance
        case = copy_tables.long_and_short_rows(3, *pair, align, part_rows, fold=cols * packed)
        assert copy_tables.num_folded(case.table, 4096, aligned=skew == 0) >= 2  # the longer row may have a remainder
        memories = case.memories(1, exact=INTERPRETED)
        wanted, *sums = case.expected(memories, "target")
        assert_equal(run(case, memories, "target", skew=skew), (wanted, *sums))
        got = run(case, memories, "target", write=False, skew=skew)
        assert_equal(got, (case.targets(), *sums))

    @pytest.mark.parametrize(("dtype", "skew"), [(BF16, 2), (FP8, 5), (FP64, 4)])
    def test_folded_rows_may_be_unaligned(self, dtype, skew):
        case = copy_tables.long_and_short_rows(skew, dtype, dtype, 16, part_rows=120, fold=128)
        memories = case.memories(1)
        assert_equal(run(case, memories, skew=skew), case.expected(memories, "source"))

    @pytest.mark.parametrize("align", [1, 16])
    @pytest.mark.parametrize("pair", [(UINT8, UINT8), (FP64, FP64), (FP32, BF16)], ids=str)
    def test_offsets_may_exceed_32_bits(self, pair, align):
        case = copy_tables.long_and_short_rows(4, *pair, align, part_rows=120, fold=128)
        memories = case.memories(1, exact=INTERPRETED)
        assert_equal(run(case, memories, far=3 << 30), case.expected(memories, "source"))

    @pytest.mark.parametrize("write", [False, True])
    @pytest.mark.parametrize(("cols", "rows"), [(192, 700), (1024, 90), (60_000, 3)])
    def test_copies_larger_than_a_tile(self, cols, rows, write):
        case = copy_tables.random_copies(cols, BF16, BF16, align=64, num_copies=4, max_rows=rows, max_cols=cols)
        memories = case.memories(1)
        wanted, checksums, non_finite = case.expected(memories, "source")
        assert_equal(run(case, memories, write=write), (wanted if write else case.targets(), checksums, non_finite))

    @pytest.mark.parametrize(("dtype", "skew"), [(BF16, 2), (BF16, 8), (FP32, 4), (FP8, 1), (FP64, 8)])
    def test_blocks_may_be_unaligned(self, dtype, skew):
        case = copy_tables.random_copies(4, dtype, dtype, align=16, **SIZE)
        memories = case.memories(1)
        assert_equal(run(case, memories, skew=skew), case.expected(memories, "source"))

    def test_one_element_copies_and_empty_tables(self):
        case = copy_tables.random_copies(5, BF16, BF16, num_copies=12, max_cols=1, max_rows=1)
        memories = case.memories(1)
        assert_equal(run(case, memories), case.expected(memories, "source"))
        none = CopyTable(BF16, BF16, **{name: getattr(case.table, name)[:0] for name in COLUMNS})
        from tidemill_weight_update.copy.cuda import CudaCopier

        checksums = torch.zeros(7, dtype=torch.int64, device=DEVICE)
        CudaCopier([none], DEVICE).run([], [], checksums)
        CudaCopier([], DEVICE).run([], [], checksums)
        assert checksums.count_nonzero() == 0

    def test_checksums_accumulate_over_runs_tables_and_addresses(self):
        from tidemill_weight_update.copy.cuda import CudaCopier

        cases = [copy_tables.random_copies(seed, BF16, to, align=8, **SIZE) for seed, to in ((6, BF16), (7, FP32))]
        shift = len(cases[0].memory_bytes), len(cases[0].target_bytes)
        second = {name: getattr(cases[1].table, name) for name in COLUMNS}
        second |= {"memory": second["memory"] + shift[0], "target": second["target"] + shift[1]}
        copier = CudaCopier([cases[0].table, CopyTable(BF16, FP32, **second)], DEVICE)
        checksums = torch.zeros(9, dtype=torch.int64, device=DEVICE)
        total = torch.zeros(9, dtype=torch.int64)
        for seed in range(3 if INTERPRETED else 6):  # more sets of addresses than the copier caches
            memories = [case.memories(seed, exact=INTERPRETED) for case in cases]
            wanted = [case.expected(memory, "source") for case, memory in zip(cases, memories, strict=True)]
            sources = [block.to(DEVICE) for memory in memories for block in memory]
            targets = [block.to(DEVICE) for case in cases for block in case.targets()]
            copier.run([s.data_ptr() for s in sources], [t.data_ptr() for t in targets], checksums)
            assert all(torch.equal(t.cpu(), w) for t, w in zip(targets, wanted[0][0] + wanted[1][0], strict=True))
            total[:7] += wanted[0][1] + wanted[1][1]
            assert torch.equal(checksums.cpu(), total)

    def test_kernel_is_loaded_once(self, monkeypatch):
        from tidemill_weight_update.copy import cuda

        runs, run_kernel = [], cuda.CudaCopier.run
        monkeypatch.setattr(cuda.CudaCopier, "run", lambda *args: runs.append(run_kernel(*args)))
        cuda.load_kernel.cache_clear()
        for _ in range(2):
            cuda.load_kernel(DEVICE)
        assert len(runs) == 1

    def test_invalid_arguments_are_refused(self):
        from tidemill_weight_update.copy.cuda import CudaCopier

        case = copy_tables.random_copies(8, FP32, FP32)
        copier = CudaCopier([case.table], DEVICE)
        with pytest.raises(ValueError, match="expected 3 memory addresses, got 2"):
            copier.run([0, 0], [0, 0])
        with pytest.raises(ValueError, match=r"target address 0x2 is not a multiple of the size of torch\.float32"):
            copier.run([0, 0, 0], [2, 2])
        with pytest.raises(ValueError, match=r"got torch\.int32 to torch\.bfloat16; cast the tensor before it is sent"):
            CudaCopier([copy_tables.random_copies(8, torch.int32, BF16).table], DEVICE)
        odd = CudaCopier([copy_tables.random_copies(8, torch.float8_e4m3fnuz, torch.float8_e4m3fnuz).table], DEVICE)
        with pytest.raises(ValueError, match="cannot be found on a GPU; pass allow_non_finite=True"):
            odd.run([0] * 3, [0] * 2, non_finite=torch.zeros(7, dtype=torch.int32, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offsets_beyond_4_gib_in_a_huge_tensor():
    """Copy the odd quarters of all rows of a 5 GiB tensor to the second half of another block of this size."""
    from tidemill_weight_update.copy.cuda import CudaCopier

    rows, cols = 5 << 17, 4096
    source = torch.randint(-(2**63), 2**63 - 1, (rows, cols // 4), device=DEVICE).view(torch.int16)
    target = torch.full((rows * cols + 8,), 0x5A5A, dtype=torch.int16, device=DEVICE)
    quarters = [1, 3]
    columns = {name: np.zeros(2, np.int64) for name in COLUMNS}
    columns |= {"rows": np.full(2, rows), "cols": np.full(2, cols // 4), "tensor": np.array([0, 0])}
    columns |= {"src": np.array(quarters) * cols // 4, "src_pitch": np.full(2, cols)}
    columns |= {"dst": rows * cols // 2 + np.array([0, cols // 4]), "dst_pitch": np.full(2, cols // 2)}
    columns |= {"pos": columns["src"], "pos_pitch": columns["src_pitch"]}
    checksums = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    copier = CudaCopier([CopyTable(torch.int16, torch.int16, **columns)], DEVICE)
    copier.run([source.data_ptr()], [target.data_ptr()], checksums)
    parts = [source[:, q * cols // 4 : (q + 1) * cols // 4] for q in quarters]
    wanted = sum(checksum_rows(p, q * cols // 4, cols) for p, q in zip(parts, quarters, strict=True))
    assert checksums[0] == wanted
    half = target[rows * cols // 2 : rows * cols].view(rows, cols // 2)
    assert torch.equal(half[:, : cols // 4], parts[0])
    assert torch.equal(half[:, cols // 4 :], parts[1])
    assert (target[: rows * cols // 2] == 0x5A5A).all()
    assert (target[rows * cols :] == 0x5A5A).all()


@pytest.mark.skipif(INTERPRETED, reason="runs the interpreter itself")
@pytest.mark.timeout(600)
def test_kernel_tests_pass_in_the_triton_interpreter():
    pytest.importorskip("triton")
    run_in_interpreter(__file__, "TestKernel")
