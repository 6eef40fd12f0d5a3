"""Overhead of a batch: each operation against the plain operation on the same bytes, alternating, in one run.

    python bench/dataproto.py             three minutes, 5 GiB of memory, starts its own Ray
    python bench/dataproto.py --tiny      seconds; checks that the benchmark runs, the ratios mean nothing
    python bench/dataproto.py --no-ray    without the object store
    python bench/dataproto.py --only-ray  the object store alone

Batches have 10 columns, 256 MiB in total, 6 of 4 bytes and 4 of 2 bytes per element: dense ones of 1024 x 8192, ragged
ones with rows of 1 to 8192, whose columns share one layout or have one each. Prints the median of both sides, the
median of the ratios of neighbouring runs, and the bound.
"""

import argparse
import gc
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tidemill_dataproto import DataProto, karmarkar_karp, ragged, rearrange_micro_batches

DTYPES = [torch.int32] * 2 + [torch.float32] * 4 + [torch.bfloat16] * 4
BYTES_PER_ELEMENT = sum(dtype.itemsize for dtype in DTYPES)
CORES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    rows: int
    width: int
    turns: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.width * BYTES_PER_ELEMENT


def main() -> int:
    """Return 0 if every ratio and time is within its bound."""
    args = _arguments()
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > CORES:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    torch.set_num_threads(CORES)
    sizes = Sizes(rows=64, width=256, turns=3) if args.tiny else Sizes(rows=1024, width=8192, turns=15)
    print(f"{sizes.num_bytes / 2**20:.0f} MiB, {CORES} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(f"{'':44} {'ours ms':>9} {'plain ms':>9} {'ratio':>7} {'bound':>7}")
    batches = {
        "dense": dense_batch(sizes),
        "ragged, one layout": ragged_batch(sizes, own_layouts=False),
        "ragged, ten layouts": ragged_batch(sizes, own_layouts=True),
    }
    within = []
    if not args.only_ray:
        within += [*operations(batches, sizes), *planning(batches, sizes)]
    if args.ray:
        within += [*warm_store(batches, sizes), *cold_store(batches, sizes)]
    return 0 if all(within) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-ray", dest="ray", action="store_false")
    parser.add_argument("--only-ray", action="store_true")
    return parser.parse_args()


def dense_batch(sizes: Sizes) -> DataProto:
    shape = sizes.rows, sizes.width
    columns = {f"c{i}": torch.ones(shape, dtype=dtype) for i, dtype in enumerate(DTYPES)}
    return DataProto.from_dict(columns, {"uid": [f"{row}" for row in range(sizes.rows)]}, {"step": 1})


def ragged_batch(sizes: Sizes, *, own_layouts: bool) -> DataProto:
    """Make a batch of twice as many rows as the dense one, of half its length on average."""
    rows = 2 * sizes.rows
    columns: dict[str, torch.Tensor] = {}
    for i, dtype in enumerate(DTYPES):
        lengths = torch.randint(1, sizes.width + 1, (rows,), generator=torch.Generator().manual_seed(i * own_layouts))
        flat = torch.ones(int(lengths.sum()), dtype=dtype)
        shares = i > 0 and not own_layouts
        columns[f"c{i}"] = ragged.like(flat, columns["c0"]) if shares else ragged.ragged(flat, lengths)
    return DataProto.from_dict(columns, {"uid": [f"{row}" for row in range(rows)]}, {"step": 1})


def operations(batches: dict[str, DataProto], sizes: Sizes) -> list[bool]:
    """Concatenation of 8 parts against torch.cat, and random rows against index_select, of as many bytes."""
    within = []
    for name, batch in batches.items():
        parts, plain_parts = batch.chunk(8), [column.chunk(8) for column in plain_columns(batch)]
        within.append(
            compare(
                f"concat of 8 parts, {name}",
                lambda parts=parts: DataProto.concat(parts),
                lambda plain_parts=plain_parts: [torch.cat(pieces) for pieces in plain_parts],
                bound=1.3,
                turns=sizes.turns,
            )
        )
    for name, batch in batches.items():
        rows, plain = torch.randperm(len(batch)), plain_columns(batch)
        within.append(
            compare(
                f"selection of all rows, {name}",
                lambda batch=batch, rows=rows: batch[rows],
                lambda plain=plain, rows=rows: [column.index_select(0, rows) for column in plain],
                bound=1.5,
                turns=sizes.turns,
            )
        )
    return within


def plain_columns(batch: DataProto) -> list[torch.Tensor]:
    """Make dense tensors with the rows and elements of the columns, or up to one element per row more.

    Never fewer: glibc requests 32 MiB and more from the kernel every time, which takes longer than filling them, and
    smaller sizes from its heap. The columns are about as large, so a few bytes less would make the plain side several
    times faster.
    """
    flats = [ragged.values(batch[f"c{i}"]) if batch[f"c{i}"].is_nested else batch[f"c{i}"] for i in range(len(DTYPES))]
    rows = len(batch)
    return [torch.ones((rows, -(-flat.numel() // rows)), dtype=flat.dtype) for flat in flats]


def planning(batches: dict[str, DataProto], sizes: Sizes) -> list[bool]:
    """Operations whose time does not depend on the bytes: cutting and balancing."""
    within = [
        measure(f"chunk(8), {name}", lambda batch=batch: batch.chunk(8), bound_ms=0.2, turns=500)
        for name, batch in batches.items()
    ]
    count, parts = (4096, 64) if sizes.turns > 3 else (64, 4)
    lengths = torch.randint(1, sizes.width + 1, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    cap = int(1.02 * sum(lengths) / parts)
    costs = DataProto.from_dict({"cost": torch.tensor(lengths)})

    def micro_batches() -> None:
        rearrange_micro_batches(costs, cap, num_micro_batches=parts, length_key="cost")

    what, turns = f"balance {count} rows into {parts}", sizes.turns
    within.append(measure(f"{what} parts", lambda: karmarkar_karp(lengths, parts), bound_ms=50, turns=turns))
    within.append(measure(f"{what} micro-batches", micro_batches, bound_ms=50, turns=turns))
    return within


def warm_store(batches: dict[str, DataProto], sizes: Sizes) -> list[bool]:
    """Put, and put and get, a batch against one numpy array of the same size, into memory that the store has used."""
    import ray

    def put_and_get(value: Any) -> None:
        ray.get(ray.put(value))

    array = np.ones(sizes.num_bytes, dtype=np.uint8)
    within = []
    with local_ray(max(6 * sizes.num_bytes, 200 << 20)):
        for what, call in (("put", ray.put), ("put and get", put_and_get)):
            for name, batch in batches.items():
                within.append(
                    compare(
                        f"Ray {what}, warm, {name}",
                        lambda batch=batch, call=call: call(batch),
                        lambda call=call: call(array),
                        bound=1.3,
                        turns=sizes.turns,
                        pause_s=0.2,  # the store frees unreferenced objects a moment later
                    )
                )
    return within


def cold_store(batches: dict[str, DataProto], sizes: Sizes) -> list[bool]:
    """Put a batch against one numpy array of the same size, into memory that the store uses for the first time."""
    import ray

    array = np.ones(sizes.num_bytes, dtype=np.uint8)
    turns = 3
    within = []
    for name, batch in batches.items():
        held: list[Any] = []  # the store does not reuse the memory of these objects

        def put(value: Any, held: list[Any] = held) -> None:
            held.append(ray.put(value))

        with local_ray(max(2 * (turns + 3) * sizes.num_bytes, 200 << 20)):
            name = f"Ray put, cold, {name}"
            within.append(compare(name, lambda b=batch: put(b), lambda: put(array), bound=1.3, turns=turns))
            held.clear()
    return within


@contextmanager
def local_ray(store_bytes: int) -> Iterator[None]:
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray

    ray.init(address="local", num_cpus=1, object_store_memory=store_bytes, include_dashboard=False,
             log_to_driver=False, logging_level=logging.ERROR)  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def compare(
    name: str,
    ours: Callable[[], object],
    plain: Callable[[], object],
    *,
    bound: float,
    turns: int,
    pause_s: float = 0.0,
) -> bool:
    """Time both alternately, after two warm-up runs of each."""
    pairs = [(timed(ours, pause_s), timed(plain, pause_s)) for _ in range(turns + 2)][2:]
    ratio = statistics.median(a / b for a, b in pairs)
    mine, theirs = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    print(f"{name:44} {mine:9.2f} {theirs:9.2f} {ratio:7.2f} {bound:7.2f}{'' if ratio <= bound else '  above'}")
    return ratio <= bound


def measure(name: str, ours: Callable[[], object], *, bound_ms: float, turns: int) -> bool:
    milliseconds = statistics.median([timed(ours, 0.0) for _ in range(turns + 2)][2:]) * 1e3
    print(f"{name:44} {milliseconds:9.3f} {'':9} {'':7} {bound_ms:4} ms{'' if milliseconds <= bound_ms else '  above'}")
    return milliseconds <= bound_ms


def timed(fn: Callable[[], object], pause_s: float) -> float:
    """Return the seconds of one call; its result is freed before the next one."""
    started = time.perf_counter()
    result = fn()
    seconds = time.perf_counter() - started
    del result
    if pause_s:
        gc.collect()
        time.sleep(pause_s)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
