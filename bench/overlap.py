"""How much of training and generation overlaps, with engines whose responses have a long tail.

    python bench/overlap.py           ten minutes on two cores, without GPU
    python bench/overlap.py --tiny    checks that the benchmark runs; the numbers mean nothing

Engines and training are simulated by waiting; problems, episodes, their processes, Ray, ledger and the bound are those
of a run. The time of a response is log-normal, and the longest of 1,000 takes 20 times as long as the median. An engine
runs `--slots` requests at a time; others wait. Training takes `--train` times as long as generation without idle slots;
1, the default, is the hardest case, in which both sides are equally busy. The ideal step takes the time of the busier
side. `wait` is the time for which training waits for episodes, and `mean` and `max` are the staleness of tokens. From
the start of the longest response of a step until the end of its training there are at most k + 1 steps, so no schedule
that drops nothing has steps shorter than their sum / (k + 1).
"""

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from rich.console import Console
from tidemill_dispatch import Worker
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tidemill_rollout import Generation, SamplingParams
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import load_config
from tidemill_trainer.demo import write_assets
from tidemill_trainer.inputs import Inputs, load_inputs
from tidemill_trainer.progress import Progress
from tidemill_trainer.ray_session import start_ray
from tidemill_trainer.rollout.engines import Engines
from tidemill_trainer.rollout.episode_pool import EpisodePool
from tidemill_trainer.rollout.exchange import serve
from tidemill_trainer.rollouts import Rollouts
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.staleness import check_staleness
from tidemill_trainer.stalls.watch import Watch
from tidemill_trainer.waits import Waits, waits_of

FACTOR = 20.0
SIGMA = math.log(FACTOR) / 3.0902  # quantile 0.999 of the normal distribution
NUM_PARTS = 8
UPDATE_S = 0.03


class SimulatedEngine:
    """An engine that waits: a response has `NUM_PARTS` tokens, each of which takes an equal part of its time.

    Args:
        median_s: median time of a response.
        slots: requests that it runs at the same time.
    """

    def __init__(self, median_s: float, slots: int) -> None:
        self._median_s = median_s
        self._slots = asyncio.Semaphore(slots)
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.version = 0
        self.busy_s = 0.0

    async def generate(self, token_ids: Any, sampling: SamplingParams, *, session_id: str) -> Generation:
        normal = np.random.default_rng(sampling.seed).standard_normal()
        part_s = self._median_s * math.exp(SIGMA * normal) / NUM_PARTS
        versions = []
        async with self._slots:
            for _ in range(NUM_PARTS):
                await self.may_run.wait()
                versions.append((str(self.version), 1))
                await asyncio.sleep(part_s)
                self.busy_s += part_s
        return Generation(
            token_ids=[1] * NUM_PARTS, log_probs=[-1.0] * NUM_PARTS, finish_reason="length", versions=versions
        )


class SimulatedWorker(Worker):
    """A rollout worker with a simulated engine."""

    def __init__(self, median_s: float, slots: int, number: int) -> None:
        self._number = number
        self._engine = SimulatedEngine(median_s, slots)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def connect_episode_workers(self, workers: list[Any]) -> None:
        for worker in workers:
            asyncio.run_coroutine_threadsafe(serve(self._engine, worker, self._number), self._loop)

    def update(self, version: int) -> float:
        """Stop, change the version and continue, like an update of weights; return the busy seconds so far."""
        self._loop.call_soon_threadsafe(self._engine.may_run.clear)
        time.sleep(UPDATE_S)
        self._engine.version = version
        self._loop.call_soon_threadsafe(self._engine.may_run.set)
        return self._engine.busy_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 64], help="requests of an engine at a time")
    parser.add_argument("--median", type=float, default=0.5, help="median seconds of a response")
    parser.add_argument("--train", type=float, default=1.0, help="time of training / time of generation")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.slots, args.median = 3, [64], 0.05
    folder = Path(tempfile.mkdtemp(prefix="overlap-"))
    assets = write_assets(folder / "assets")
    print(f"{args.engines} engines, 64 x 8 responses a step, {args.steps} steps after 2")
    print(
        f"{'slots':>5} {'k':>2} {'s/step':>7} {'ideal':>6} {'share':>6} {'wait':>6} {'mean':>5} {'max':>4}", flush=True
    )
    for slots in args.slots:
        for k in (0, 1, 2, 4):
            sizes = ["data.train_batch_size=64", "rollout.n=8", f"rollout.num_engines={args.engines}"]
            run = [f"rollout.max_staleness={k}", f"trainer.total_steps={args.steps + 2}", "episode.num_workers=2"]
            correction = ["algorithm.bypass_mode=true"] if k else []
            config = load_config(DEMO_CONFIG, [*assets, *sizes, *run, *correction, "rollout.response_length=8"])
            measure(config, args.median, slots, args.train, RunDir(folder / f"{slots}-{k}"))


def measure(config: Config, median_s: float, slots: int, train_factor: float, run: RunDir) -> None:
    progress = Progress(Console(file=sys.stderr, quiet=True))
    inputs = load_inputs(config, progress)
    num_engines, k = config.rollout.num_engines, config.rollout.max_staleness
    owns_ray = start_ray(None, num_engines + config.episode.num_workers)
    run.logs.mkdir(parents=True)

    def start_engine(number: int) -> RayWorkerGroup:
        engine = RayClassWithInitArgs(SimulatedWorker, median_s, slots, number)
        return RayWorkerGroup(RayResourcePool([1]), engine, name_prefix=f"rollout_{number}")

    engines = Engines(start_engine, config, progress, str(run.logs))
    engines.start_processes()
    watch = Watch(Waits(waits_of(config)), run.logs, progress)
    pool = EpisodePool(config.episode.num_workers, engines, str(run.logs), progress, watch)
    try:
        pool.load(config)
        train_s = train_factor * 64 * 8 * median_s * math.exp(SIGMA**2 / 2) / (slots * num_engines)
        rows = list(steps(config, inputs, engines, pool, run, progress, train_s))[2:]
    finally:
        pool.shutdown()
        for engine in engines.all():
            engine.group.shutdown()
        if owns_ray:
            ray.shutdown()
    seconds, waited, busy, mean, oldest = (statistics.mean(column) for column in zip(*rows, strict=True))
    ideal = max(train_s + UPDATE_S, busy / (slots * num_engines))
    print(f"{slots:5} {k:2} {seconds:7.2f} {ideal:6.2f} {ideal / seconds:6.2f} {waited:6.2f} {mean:5.2f} ", end="")
    print(f"{oldest:4.1f}", flush=True)


def steps(
    config: Config,
    inputs: Inputs,
    engines: Engines,
    pool: EpisodePool,
    run: RunDir,
    progress: Progress,
    train_s: float,
) -> Any:
    """Yield seconds, those of waiting, busy seconds of the engines, mean and maximum staleness of each step."""
    rollouts = Rollouts(config, pool, inputs, run, progress)
    busy_before = 0.0
    for step in range(1, config.trainer.total_steps + 1):
        began = time.monotonic()
        episodes = rollouts.take(step)
        waited = time.monotonic() - began
        assert episodes.rows is not None
        ages = check_staleness(episodes.rows, step - 1, config.rollout.max_staleness)
        time.sleep(train_s)
        rollouts.settle(step, episodes, episodes.rows["response_mask"].values().sum().int().item())
        busy = sum(ray.get([worker.update.remote(step) for worker in engines.workers.values()]))
        yield time.monotonic() - began, waited, busy - busy_before, ages["staleness/mean"], ages["staleness/max"]
        busy_before = busy


if __name__ == "__main__":
    main()
