"""Overhead of a call through a worker group beyond its Ray calls, and bytes of a chained call that reach the driver.

    python bench/dispatch.py [--rounds 200]

Both halves of each comparison run alternately in one process over the same actors, on all cores. The exit status is 1
if a result exceeds its limit (`LIMIT_MS`, and 0 bytes).
"""

import argparse
import logging
import os
import socket
import stat
import statistics
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray
from ray import cloudpickle
from tidemill_dispatch import ListBatch, Worker, register, split_over
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tidemill_dispatch.ray.pickling import pack

NUM_RANKS, DP_SIZE = 8, 4
LIMIT_MS = 1.0
CHAINED_ROUNDS = 9
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rows:
    """A batch of one float32 column [B, C]."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def chunk(self, n: int) -> list["Rows"]:
        return [Rows(part) for part in np.array_split(self.values, n)]

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(self.values[rows])

    @staticmethod
    def concat(parts: list["Rows"]) -> "Rows":
        return Rows(np.concatenate([part.values for part in parts]))


class Echo(Worker):
    """Ranks in dp 4 x tp 2; the second rank of each pair is collected. The mesh "halves" has two shards."""

    def __init__(self) -> None:
        self.register_dispatch_collect_info("mesh", self.rank // 2, self.rank % 2 == 1, dp_size=DP_SIZE)
        self.register_dispatch_collect_info("halves", self.rank % 2, self.rank < 2, dp_size=2)

    @register(split_over("mesh"))
    def echo(self, batch: ListBatch, temperature: float) -> ListBatch:
        return batch

    @register(split_over("mesh"))
    def rows(self, batch: Rows, temperature: float) -> int:
        return len(batch)

    @register(split_over("mesh"), blocking=False)
    def make(self, batch: ListBatch) -> Rows:
        return Rows(np.full((len(batch), batch[0]), self.rank, np.float32))

    @register(split_over("halves"), blocking=False)
    def read(self, batch: Rows) -> float:
        return float(batch.values.sum())


def alternate(rounds: int, *functions: Callable[[], object]) -> list[list[float]]:
    """Call the functions alternately and return the milliseconds of each call by function."""
    times: list[list[float]] = [[] for _ in functions]
    for i in range(rounds + 10):
        for function, spent in zip(functions, times, strict=True):
            started = time.perf_counter()
            function()
            if i >= 10:
                spent.append(1e3 * (time.perf_counter() - started))
            time.sleep(0.01)  # Ray frees the objects of one call outside the time of the next
    return times


def overhead(group: RayWorkerGroup, rounds: int) -> float:
    """Print the time of a call over a mesh next to that of Ray's calls; return the largest overhead in ms.

    "its Ray calls" are the same puts, the same calls of the same actors and one get, without the group. "plain" is
    hand-written code with one return value per call and the results of all ranks.
    """
    print(f"call over {NUM_RANKS} actors (dp {DP_SIZE} x tp 2), medians of {rounds} alternating rounds, ms")
    print(f"{'':34}{'plain':>9}{'its Ray calls':>15}{'group':>10}{'overhead':>10}")
    workers = group.workers
    small = ListBatch(list(range(64)))
    large = Rows(np.ones((64, 1 << 17), np.float32))  # 32 MiB

    def plain_small() -> None:
        shards = small.chunk(DP_SIZE)
        ray.get([worker.echo.remote(shards[rank // 2], 0.5) for rank, worker in enumerate(workers)])

    def plain_large() -> None:
        shards = [ray.put(shard) for shard in large.chunk(DP_SIZE)]
        results = [worker.rows.remote(shards[rank // 2], 0.5) for rank, worker in enumerate(workers)]
        del shards  # as in the group: Ray frees them within the measured time, when the last rank is done
        ray.get(results)

    def ray_calls(method: str, shards: list[Any]) -> None:
        header = ("", method, 1, ("temperature",))
        results: list[Any] = []
        for rank, worker in enumerate(workers):
            if rank % 2:
                results += worker.tidemill_call.remote(header, shards[rank // 2], 0.5)
            else:
                results.append(worker.tidemill_call_uncollected.remote(header, shards[rank // 2], 0.5))
        shards.clear()
        ray.get(results)

    small_shards = [pack("shard", shard) for shard in small.chunk(DP_SIZE)]
    worst = 0.0
    for name, *functions in [
        (
            "64 Python rows to workers and back",
            plain_small,
            lambda: ray_calls("echo", list(small_shards)),
            lambda: group.echo(small, temperature=0.5),
        ),
        (
            "32 MiB to workers, numbers back",
            plain_large,
            lambda: ray_calls("rows", [ray.put(shard) for shard in large.chunk(DP_SIZE)]),
            lambda: group.rows(large, temperature=0.5),
        ),
    ]:
        plain, calls, ours = (statistics.median(times) for times in alternate(rounds, *functions))
        print(f"{name:34}{plain:9.2f}{calls:15.2f}{ours:10.2f}{ours - calls:10.2f}")
        worst = max(worst, ours - calls)
    return worst


def store_bytes_touched() -> int:
    """Return the bytes of Ray's object store in the pages that this process has read or written."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.endswith("kB") and "-" in line.split(" ", 1)[0]:
            inside = "plasma" in line
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def tcp_bytes() -> dict[int, int]:
    """Return the bytes sent and received by each TCP socket of this process, by inode."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{fd}")
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # no TCP socket, or closed meanwhile
            continue
        found[status.st_ino] = sum(struct.unpack_from("QQ", info, 120))  # tcpi_bytes_acked, tcpi_bytes_received
    return found


def chained(group: RayWorkerGroup) -> int:
    """Print the bytes of a batch that reach the driver in chained calls, and their time; return the bytes.

    Runs first: a store page that this process has touched before cannot show a second access. A warm-up run of each
    size lets the workers touch their pages, because the first write to a page is several times slower. The same calls
    with the batch through the driver run last.
    """
    print(f"make (mesh of {DP_SIZE} shards, two ranks each) -> read (mesh of 2 shards, four ranks each)")
    print(f"{'':14}{'bytes at the driver':>28}{'ms, median of ' + str(CHAINED_ROUNDS):>28}")
    print(f"{'batch':>14}{'store':>14}{'TCP':>14}{'chained':>14}{'by driver':>14}")
    sizes = [1 << 13, 1 << 16, 1 << 19]
    driver_bytes = 0
    seen: dict[int, tuple[int, int, float]] = {}
    for columns in [*sizes[::-1], *sizes]:  # the first run of each size is a warm-up
        rows = ListBatch([columns] * 64)
        store, tcp, times = store_bytes_touched(), tcp_bytes(), []
        for _ in range(CHAINED_ROUNDS):
            started = time.perf_counter()
            total = sum(group.read(group.make(rows)).get())
            times.append(1e3 * (time.perf_counter() - started))
            assert total == 64 * columns * 4.0, total  # ranks 1, 3, 5, 7 collect
            time.sleep(0.3)
        control = sum(count - tcp.get(inode, 0) for inode, count in tcp_bytes().items()) // CHAINED_ROUNDS
        seen[columns] = store_bytes_touched() - store, control, statistics.median(times)
        driver_bytes += seen[columns][0] + (control if columns == sizes[-1] and control > columns else 0)
    for columns in sizes:
        rows, times = ListBatch([columns] * 64), []
        for _ in range(CHAINED_ROUNDS):
            started = time.perf_counter()
            group.read(group.make(rows).get()).get()
            times.append(1e3 * (time.perf_counter() - started))
            time.sleep(0.3)
        store, control, ms = seen[columns]
        print(f"{64 * columns * 4:14,}{store:14,}{control:14,}{ms:14.1f}{statistics.median(times):14.1f}")
    print("TCP is Ray's control traffic; more than a 256th of the largest batch counts as bytes of the batch.\n")
    return driver_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=1 << 30,
    )
    print(f"{os.cpu_count()} cores, Ray {ray.__version__}, load {os.getloadavg()[0]:.2f} at the start")
    pool = RayResourcePool([NUM_RANKS], num_cpus_per_worker=0.25)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Echo), name_prefix="bench") as group:
        chained_bytes = chained(group)
        more_ms = overhead(group, rounds)
    ray.shutdown()
    fast, past = more_ms <= LIMIT_MS, chained_bytes == 0
    print(f"\ngroup call: {more_ms:.2f} ms more than its Ray calls, limit {LIMIT_MS} ms: {'ok' if fast else 'MISSED'}")
    print(f"chained call: {chained_bytes} bytes of the batch at the driver, limit 0: {'ok' if past else 'MISSED'}")
    return 0 if fast and past else 1


if __name__ == "__main__":
    sys.exit(main())
