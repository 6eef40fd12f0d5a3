"""Benchmark of the copy kernel: bytes per second compared with one plain device copy of the same bytes, in one run.

    python bench/copy_kernel.py            one GPU, 22 GB each for sources and targets, about half a minute
    python bench/copy_kernel.py --peer     sources on cuda:1, read over NVLink
    python bench/copy_kernel.py --tiny     few small tensors, whose rates have no meaning: also without a GPU

Columns:
    payload     GB that are sent: read once and, unless a mode only reads, written once (in the dtype of the target)
    ms          median time on the device
    GB/s        payload per second
    moved       GB read and written per second
    of plain    `moved` as a fraction of that of a plain copy by torch
    queue ms    time until the call returns on the host; on a CPU this is the copy itself

All results are checked.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tidemill_weight_update.copy.checksum import checksum_rows
from tidemill_weight_update.copy.copier import Blocks, Copier
from tidemill_weight_update.copy.table import COLUMNS, CopyTable
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
MODES = {
    "copy": {"write": True, "sums": False, "find": False},
    "copy, checksum": {"write": True, "sums": True, "find": False},
    "copy, checksum, NaN": {"write": True, "sums": True, "find": True},
    "checksum": {"write": False, "sums": True, "find": False},
    "checksum, NaN": {"write": False, "sums": True, "find": True},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A table that copies from one block to another, and the shape of each of its sources."""

    name: str
    table: CopyTable
    shapes: tuple[tuple[int, int], ...]
    modes: tuple[str, ...]

    @property
    def num_elements(self) -> int:
        return int((self.table.rows * self.table.cols).sum())

    @property
    def payload_bytes(self) -> int:
        return self.num_elements * self.table.dst_dtype.itemsize

    @property
    def read_bytes(self) -> int:
        return self.num_elements * self.table.src_dtype.itemsize


def contiguous(name: str, sizes: np.ndarray, modes: Sequence[str], src_dtype: torch.dtype = BF16) -> Case:
    """Return tensors stored one after the other that are copied to another order."""
    order = np.random.default_rng(0).permutation(len(sizes))
    starts = np.zeros_like(sizes)
    starts[order] = np.cumsum(sizes[order]) - sizes[order]
    table = _table(src_dtype, rows=np.ones_like(sizes), cols=sizes, src=np.cumsum(sizes) - sizes, dst=starts)
    return Case(name, table, tuple((1, int(n)) for n in sizes), tuple(modes))


def columns_of(name: str, number: int, rows: int, cols: int, parts: int, modes: Sequence[str]) -> Case:
    """Return the second of `parts` vertical parts of matrices stored one after the other."""
    index, part = np.arange(number), np.full(number, cols // parts)
    pitch, starts = np.full(number, cols), index * rows
    places = {"src": starts * cols + part, "src_pitch": pitch, "dst": starts * part, "dst_pitch": part}
    table = _table(BF16, rows=np.full(number, rows), cols=part, pos=part, pos_pitch=pitch, **places)
    return Case(name, table, ((rows, cols),) * number, tuple(modes))


def _table(src_dtype: torch.dtype, **columns: np.ndarray) -> CopyTable:
    """Return a table with a row per source; missing columns are 0."""
    zeros = np.zeros(len(columns["rows"]), np.int64)
    first = zeros.astype(np.int32)
    every: dict[str, Any] = dict.fromkeys(COLUMNS, zeros) | columns
    every |= {"tensor": np.arange(len(zeros), dtype=np.int32), "memory": first, "target": first}
    return CopyTable(src_dtype, BF16, **every)


def cases(scale: float, tiny: bool) -> list[Case]:
    """Return the cases, of at most 22 GB times `scale`."""
    if tiny:
        scale = 1e-3
    unit = 16 if tiny else 1024
    rng = np.random.default_rng(0)
    dense = np.full(max(3, round(399 * scale)), 20_500 * unit)
    experts = rng.integers(768, 1536, max(5, round(9435 * scale))) * unit
    rows, number = 2 * unit, max(2, round(6000 * scale))
    return [
        contiguous(f"{len(dense)} tensors of {dense[0] * 2 / 1e6:.2g} MB", dense, list(MODES)),
        contiguous(
            f"{len(experts)} of {unit * 1536 / 1e6:.2g} to {unit * 3072 / 1e6:.2g} MB",
            experts,
            ["copy", "copy, checksum", "checksum"],
        ),
        columns_of(f"1 of 4 parts of {number} x {rows} rows: 384 B", number, rows, 768, 4, ["copy", "copy, checksum"]),
        contiguous("float32 to bfloat16", dense[: len(dense) // 2 + 1], ["copy", "copy, checksum", "checksum"], FP32),
    ]


class Bench:
    """Runs cases from `source` into `target` (both uint8) and prints a line per mode."""

    def __init__(self, source: Tensor, target: Tensor, repeats: int) -> None:
        self.source, self.target, self.repeats = source, target, repeats
        self.device = target.device

    def seconds(self, action: Callable[[], object]) -> float:
        """Return the median time, by the device's clock if it has one."""
        action()
        taken = []
        for _ in range(self.repeats):
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                action()
                end.record()
                end.synchronize()
                taken.append(start.elapsed_time(end) / 1e3)
            else:
                started = time.perf_counter()
                action()
                taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    def plain(self, num_bytes: int) -> float:
        """Return the payload in bytes per second of one copy by torch."""
        source, target = self.source[:num_bytes], self.target[:num_bytes]
        return num_bytes / self.seconds(lambda: target.copy_(source))

    def copier(self, case: Case) -> Callable[..., None]:
        copier = Copier([case.table], self.device, "target", keeps=True)
        sources: Blocks = [self.source]
        if self.device.type == "cuda":  # as an address: a tensor on another GPU would be copied to this one first
            sources = [self.source.data_ptr()]
        return lambda *sums, write: copier.run(sources, [self.target] if write else [], *sums)

    def run(self, case: Case, mode: str, plain: float) -> None:
        write, sums, find = (MODES[mode][name] for name in ("write", "sums", "find"))
        checksums = torch.zeros(len(case.shapes), dtype=torch.int64, device=self.device) if sums else None
        non_finite = torch.zeros(len(case.shapes), dtype=torch.int32, device=self.device) if find else None
        copy = self.copier(case)
        if write:
            self.target.fill_(0xA5)
        copy(checksums, non_finite, write=write)
        self.check(case, checksums, non_finite, write)
        seconds = self.seconds(lambda: copy(checksums, non_finite, write=write))
        started = time.perf_counter()
        copy(checksums, non_finite, write=write)
        queued = time.perf_counter() - started
        moved = case.read_bytes + case.payload_bytes * write
        # Time of a plain copy of the moved bytes; a mode that only reads moves half as many.
        floor = moved / 2 / plain
        print(
            f"{case.name:45} {mode:20} {case.payload_bytes / 1e9:7.3f} {seconds * 1e3:9.3f} "
            f"{case.payload_bytes / seconds / 1e9:8.1f} {moved / seconds / 1e9:8.1f} {floor / seconds:7.1%} "
            f"{queued * 1e3:8.2f}",
            flush=True,
        )

    def check(self, case: Case, checksums: Tensor | None, non_finite: Tensor | None, write: bool) -> None:
        """Check a few of the sources, including the last one."""
        table = case.table
        for index in sorted({0, len(case.shapes) // 2, len(case.shapes) - 1}):
            rows, cols = int(table.rows[index]), int(table.cols[index])
            source = self.source.view(table.src_dtype)[int(table.src[index]) :]
            sent = source.as_strided((rows, cols), (int(table.src_pitch[index]), 1)).to(self.device, table.dst_dtype)
            if write:
                target = self.target.view(table.dst_dtype)[int(table.dst[index]) :]
                target = target.as_strided((rows, cols), (int(table.dst_pitch[index]), 1))
                assert torch.equal(target.view(torch.int16), sent.view(torch.int16)), f"{case.name}: {index} differs"
            if checksums is not None:
                start = int(table.pos[index])
                wanted = checksum_rows(sent, start, case.shapes[index][1])
                assert checksums[index] == wanted, (
                    f"{case.name}: checksum of {index} is {checksums[index]}, not {wanted}"
                )
            if non_finite is not None:
                wanted = not torch.isfinite(sent).all()
                assert bool(non_finite[index]) == wanted, f"{case.name}: non-finite elements in {index}: {wanted}"


def random_block(num_bytes: int, device: torch.device) -> Tensor:
    """Return uint8: small bfloat16 numbers, a few of them NaN; read as float32 they are finite and about as small."""
    numbers = torch.empty(num_bytes // 2, dtype=BF16, device=device)
    for piece in numbers.split(1 << 28):
        piece.normal_()
    numbers[:: (1 << 20) + 2] = float("nan")  # in the lower halves of float32 numbers, where they are mantissa bits
    return numbers.view(torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the tensors")
    parser.add_argument("--tiny", action="store_true", help="a few small tensors")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peer", action="store_true", help="sources on cuda:1")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    started = time.perf_counter()
    todo = cases(args.scale, args.tiny or device.type == "cpu")
    room = max(_end(case) for case in todo)
    target = torch.empty(room, dtype=torch.uint8, device=device)
    source = random_block(room, torch.device("cuda", 1) if args.peer else device)
    if args.peer:
        target[:16].copy_(source[:16])
        source[:16].copy_(target[:16])  # makes torch enable peer access between the devices
    bench = Bench(source, target, args.repeats)
    plain = bench.plain(min(room, todo[0].payload_bytes))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "host memory"
    print(f"torch {torch.__version__}, {where}, sources on {source.device}; GB are 1e9 bytes")
    print(f"{'case':45} {'mode':20} {'payload':>7} {'ms':>9} {'GB/s':>8} {'moved':>8} {'of plain':>8} {'queue ms':>8}")
    print(f"{'plain copy by torch':45} {'':20} {'':7} {'':9} {plain / 1e9:8.1f} {2 * plain / 1e9:8.1f}")
    for case in todo:
        for mode in case.modes:
            bench.run(case, mode, plain)
    print(f"{time.perf_counter() - started:.1f} s in total")


def _end(case: Case) -> int:
    """Return the number of bytes up to the last one that is read or written."""
    table = case.table
    last = table.src + np.maximum(table.rows - 1, 0) * table.src_pitch + table.cols
    return -(-int(last.max()) * table.src_dtype.itemsize // 16) * 16


if __name__ == "__main__":
    main()
