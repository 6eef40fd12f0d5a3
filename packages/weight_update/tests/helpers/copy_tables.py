"""Random copy tables and their expected results, for the tests of the copiers."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from tidemill_weight_update.copy.checksum import checksum_rows, has_non_finite
from tidemill_weight_update.copy.table import COLUMNS, CopyTable
from tidemill_weight_update.copy.tiles import cut
from torch import Tensor

NUM_TENSORS = 7


@dataclass(frozen=True, slots=True)
class Copies:
    """A table, the sizes in bytes of the blocks that it reads and writes, and its rows by column name."""

    table: CopyTable
    memory_bytes: tuple[int, ...]
    target_bytes: tuple[int, ...]
    rows: tuple[dict[str, int], ...]

    def memories(self, seed: int, exact: bool = False) -> list[Tensor]:
        """Random content as uint8; without NaN if the table casts, because casts of NaN differ between processors.

        Args:
            exact: only normal numbers that bfloat16 represents.
        """
        generator = torch.Generator().manual_seed(seed)
        dtype = self.table.src_dtype
        if dtype == self.table.dst_dtype:
            return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in self.memory_bytes]
        numbers = [torch.randn(n // dtype.itemsize, generator=generator) for n in self.memory_bytes]
        for number in numbers:  # ties, overflow and underflow in 16 bits, infinities
            pattern = number.view(torch.int32)
            pattern[::5] = pattern[::5] & -(1 << 16) | 1 << 15
            number[1::11] *= 3e38
            number[2::11] *= 1e-6 if exact else 1e-39
            number[3::97] = float("inf")
            if exact:
                pattern &= -(1 << 16)
        return [number.to(dtype).view(torch.uint8) for number in numbers]

    def targets(self) -> list[Tensor]:
        """Blocks filled with a poison byte, uint8."""
        return [torch.full((n,), 0xA5, dtype=torch.uint8) for n in self.target_bytes]

    def expected(self, memories: list[Tensor], checksum_of: str) -> tuple[list[Tensor], Tensor, Tensor]:
        """Targets, checksums and which tensors have non-finite elements after one run, computed row by row."""
        table, targets = self.table, self.targets()
        checksums = torch.zeros(NUM_TENSORS, dtype=torch.int64)
        non_finite = torch.zeros(NUM_TENSORS, dtype=torch.int32)
        for row in self.rows:
            source = memories[row["memory"]].view(table.src_dtype)
            target = targets[row["target"]].view(table.dst_dtype)
            for r in range(row["rows"]):
                read = source[row["src"] + r * row["src_pitch"] :][: row["cols"]]
                sent = read if checksum_of == "source" else read.to(table.dst_dtype)
                target[row["dst"] + r * row["dst_pitch"] :][: row["cols"]] = read.to(table.dst_dtype)
                checksums[row["tensor"]] += checksum_rows(sent[None], row["pos"] + r * row["pos_pitch"], 0)
                non_finite[row["tensor"]] |= has_non_finite(sent[None])
        return targets, checksums, non_finite


def random_copies(
    seed: int,
    src_dtype: torch.dtype,
    dst_dtype: torch.dtype,
    align: int = 1,
    num_copies: int = 40,
    max_rows: int = 30,
    max_cols: int = 600,
) -> Copies:
    """Copies between random offsets; no element is written twice.

    Args:
        align: all offsets, lengths and pitches are multiples of this many elements.
    """
    rng = random.Random(seed)

    def shape() -> tuple[int, int]:
        num_rows = rng.choice([1, 1, 2, rng.randint(1, max_rows)])
        return num_rows, align * rng.randint(1, max(1, rng.choice([max_cols, 40]) // align))

    return copies_of_shapes(rng, (shape() for _ in range(num_copies)), src_dtype, dst_dtype, align)


def long_and_short_rows(
    seed: int,
    src_dtype: torch.dtype,
    dst_dtype: torch.dtype,
    align: int,
    part_rows: int,
    fold: int,
    num_copies: int = 3,
) -> Copies:
    """Blocks of about `part_rows` short rows of up to 16 elements, between long rows; empty copies at both ends.

    Args:
        align: as in `random_copies`, up to 16.
        fold: most long rows have two to four times as many elements, the others `align` more.
    """
    rng = random.Random(seed)
    shapes = [(0, 5 * align)]
    for number in range(num_copies):
        shapes.append((1, fold * rng.randint(2, 4) + (align if number == 1 else 0)))
        shapes.append((part_rows - rng.randrange(3), max(align, 16 - align * rng.randrange(6))))
    return copies_of_shapes(rng, [*shapes, (3, 0)], src_dtype, dst_dtype, align)


def num_folded(table: CopyTable, tile_elements: int, *, aligned: bool) -> int:
    """Number of single rows of the table that its tiles fold into several rows, with aligned or unaligned blocks."""
    blocks = (np.full(1 + column.max(), aligned) for column in (table.memory, table.target))
    rows = [group.segments[:, COLUMNS.index("rows")] for group in cut(table, tile_elements, *blocks)]
    return int((table.rows[table.cols > 0] == 1).sum() - (np.concatenate(rows) == 1).sum())


def copies_of_shapes(
    rng: random.Random,
    shapes: Iterable[tuple[int, int]],
    src_dtype: torch.dtype,
    dst_dtype: torch.dtype,
    align: int,
) -> Copies:
    """Copies of the given (rows, cols), from and to random multiples of `align`."""
    rows = []
    filled, needed = [0, 0], [0, 0, 0]
    for num_rows, cols in shapes:
        pitches = [cols + align * rng.choice([0, 0, rng.randint(0, 20)]) for _ in range(3)]
        memory, target = rng.randrange(3), rng.randrange(2)
        src = align * rng.randrange(200)
        dst = filled[target] + align * rng.randrange(3)
        filled[target] = dst + max(num_rows, 1) * pitches[1]  # an empty copy is inside the block, too
        needed[memory] = max(needed[memory], src + max(num_rows, 1) * pitches[0])
        rows.append(
            {"tensor": rng.randrange(NUM_TENSORS), "memory": memory, "target": target, "rows": num_rows, "cols": cols}
            | {"src": src, "src_pitch": pitches[0], "dst": dst, "dst_pitch": pitches[1]}
            | {"pos": align * rng.choice([rng.randrange(10**4), rng.randrange(2**34)]), "pos_pitch": pitches[2]}
        )
    types = {name: np.int32 if name in ("tensor", "memory", "target") else np.int64 for name in COLUMNS}
    columns = {name: np.array([row[name] for row in rows], dtype=types[name]) for name in COLUMNS}
    return Copies(
        table=CopyTable(src_dtype=src_dtype, dst_dtype=dst_dtype, **columns),
        memory_bytes=tuple(n * src_dtype.itemsize for n in needed),
        target_bytes=tuple(n * dst_dtype.itemsize for n in filled),
        rows=tuple(rows),
    )
