"""CPU time and memory of the driver with many engines, and with many episodes that run at the same time.

    python bench/scale.py                                 all rows, about 15 minutes on two cores
    python bench/scale.py --engines 64 --episodes 5000    one row

Problems, episodes, their processes, Ray, ledger and the staleness bound are those of a run with 8 episodes of each
problem and `rollout.max_staleness=4`. All engines are simulated in one process, because a machine has no room for
thousands; the driver's calls to each of them are those of a run. Training takes no time. The engines answer only when
`--episodes` episodes run, and then those of the oldest step, which are a fifth of them.

`s/step` and `cpu` are the time and the driver's CPU time of a step, without the first two. `MiB` is the resident memory
of the driver after the last one, of which `more` has been added since the first began. `workers` is that of both
episode workers.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from rich.console import Console
from tidemill_dispatch import Dispatch, Worker, register
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tidemill_rollout import Generation, SamplingParams
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import load_config
from tidemill_trainer.demo import write_assets
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.progress import Progress
from tidemill_trainer.ray_session import start_ray
from tidemill_trainer.rollout.engines import Engines
from tidemill_trainer.rollout.episode_pool import EpisodePool
from tidemill_trainer.rollout.exchange import serve
from tidemill_trainer.rollouts import Rollouts
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.staleness import check_staleness
from tidemill_trainer.stalls.process import registered
from tidemill_trainer.stalls.watch import Watch
from tidemill_trainer.waits import Waits, waits_of

ROWS = ((16, 1_000), (16, 10_000), (16, 100_000), (256, 1_000), (1_024, 1_000), (4_096, 1_000))
N, STALENESS, NUM_TOKENS = 8, 4, 8
NUM_STEPS = 6


class SimulatedEngines(Worker):
    """All rollout workers of a run in one process, each with a simulated engine.

    Args:
        num_episodes: number of requests that wait until those of the oldest step are answered.
    """

    def __init__(self, num_episodes: int) -> None:
        self._num_episodes = num_episodes
        self._num_engines = 0
        self._version = 0
        self._waiting: dict[int, list[asyncio.Future[None]]] = defaultdict(list)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def connect_episode_workers(self, workers: list[Any]) -> None:
        """Connect a further engine, one with each call."""
        for worker in workers:
            asyncio.run_coroutine_threadsafe(serve(self, worker, self._num_engines), self._loop)
        self._num_engines += 1

    async def generate(self, token_ids: Any, sampling: SamplingParams, *, session_id: str) -> Generation:
        version, waits = str(self._version), asyncio.get_running_loop().create_future()
        self._waiting[int(session_id.partition("-")[0])].append(waits)
        if sum(map(len, self._waiting.values())) == self._num_episodes:
            for oldest in self._waiting.pop(min(self._waiting)):
                oldest.set_result(None)
        await waits
        versions = [(version, NUM_TOKENS)]
        return Generation(
            token_ids=[1] * NUM_TOKENS, log_probs=[-1.0] * NUM_TOKENS, finish_reason="length", versions=versions
        )

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def interrupt(self) -> None:
        """The driver calls this for each engine before an update."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def proceed(self) -> None:
        """The driver calls this for each engine after an update."""

    def set_version(self, version: int) -> None:
        self._version = version


class SimulatedTraining:
    """Training workers, and their updates of weights, without any work."""

    def __init__(self, engines: RayWorkerGroup) -> None:
        self._engines = engines
        self.hosts = engines.hosts

    def connect_engines(self, engines: Any, address: str | None) -> None:
        """The connections are those of the training workers, not of the driver."""

    def check_alive(self) -> None:
        """No process of it can die."""

    def update_weights(self, version: int) -> list[dict[str, float]]:
        ray.get(self._engines.workers[0].set_version.remote(version))
        return [{}]


@contextmanager
def processes(config: Config, num_episodes: int, logs: Path) -> Iterator[tuple[Engines, EpisodePool]]:
    """Start the episode workers and the process of all engines."""
    progress = Progress(Console(file=sys.stderr, quiet=True))
    logs.mkdir(parents=True)
    owns_ray = start_ray(None, 1 + config.episode.num_workers)
    group = RayWorkerGroup(
        RayResourcePool([1]), RayClassWithInitArgs(SimulatedEngines, num_episodes), name_prefix="rollout"
    )
    engines = Engines(lambda number: group, config, progress, str(logs))
    engines.start_processes()
    engines.connect(SimulatedTraining(group))  # pyright: ignore[reportArgumentType]
    watch = Watch(Waits(waits_of(config)), logs, progress)
    pool = EpisodePool(config.episode.num_workers, engines, str(logs), progress, watch)
    try:
        pool.load(config)
        yield engines, pool
    finally:
        pool.shutdown()
        group.shutdown()
        if owns_ray:
            ray.shutdown()


def measure(num_engines: int, num_episodes: int, folder: Path) -> None:
    """Print a row."""
    num_problems = num_episodes // (N * (STALENESS + 1))
    sizes = [f"data.train_batch_size={num_problems}", f"rollout.n={N}", f"rollout.num_engines={num_engines}"]
    bound = [f"rollout.max_staleness={STALENESS}", "algorithm.bypass_mode=true", "episode.num_workers=2"]
    limits = [
        f"episode.max_concurrent={num_episodes}",
        "episode.timeout_s=3600",
        f"rollout.response_length={NUM_TOKENS}",
    ]
    steps = f"trainer.total_steps={NUM_STEPS + STALENESS}"
    config = load_config(DEMO_CONFIG, [*write_assets(folder / "assets"), *sizes, *bound, *limits, steps])
    progress, run = Progress(Console(file=sys.stderr, quiet=True)), RunDir(folder / "run")
    inputs, driver = load_inputs(config, progress), psutil.Process()
    with processes(config, num_problems * N * (STALENESS + 1), run.logs) as (engines, pool):
        rollouts = Rollouts(config, pool, inputs, run, progress)
        before, seconds, cpu_s = driver.memory_info().rss, [], []
        for step in range(1, NUM_STEPS + 1):
            start, cpu_start = time.monotonic(), sum(driver.cpu_times()[:2])
            episodes = rollouts.take(step)
            assert episodes.rows is not None
            check_staleness(episodes.rows, step - 1, STALENESS)
            rollouts.settle(step, episodes, int(episodes.rows["response_mask"].values().sum()))
            engines.update_weights(step)
            seconds.append(time.monotonic() - start)
            cpu_s.append(sum(driver.cpu_times()[:2]) - cpu_start)
        memory = driver.memory_info().rss
        workers = [each.process() for each in registered(run.logs) if each.name.startswith("episodes")]
        of_workers = sum(worker.memory_info().rss for worker in workers if worker is not None)
    means = f"{statistics.mean(seconds[2:]):7.1f} {statistics.mean(cpu_s[2:]):7.2f}"
    sizes_mib = f"{memory / 2**20:6.0f} {(memory - before) / 2**20:6.0f} {of_workers / 2**20:8.0f}"
    print(f"{num_engines:7} {num_episodes:8} {means} {sizes_mib}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int)
    parser.add_argument("--episodes", type=int, default=1_000)
    args = parser.parse_args()
    print(f"{'engines':>7} {'episodes':>8} {'s/step':>7} {'cpu':>7} {'MiB':>6} {'more':>6} {'workers':>8}", flush=True)
    for num_engines, num_episodes in ROWS if args.engines is None else [(args.engines, args.episodes)]:
        with tempfile.TemporaryDirectory() as folder:
            measure(num_engines, num_episodes, Path(folder))


if __name__ == "__main__":
    main()
