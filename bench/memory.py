"""Memory of each process of a run on a CPU, step by step.

    python bench/memory.py [--steps 120] [section.key=value ...]

trains the demo's model and prints a row for every tenth step: MiB of resident memory of the driver, the training
workers, the engine's processes together and the episode workers, then the growth per 100 steps, which is the slope of a
line through the second half of the steps. The first half has compilation, caches and the allocator's arenas.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.demo import write_assets
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.stalls.process import registered

_SMALL = (
    "data.train_batch_size=16",
    "warmup.max_steps=0",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.stop_at_accuracy=1.0",
    "trainer.save_freq=20",
)


def resident_mib(run: RunDir, driver: psutil.Process) -> dict[str, float]:
    """Return the resident memory of the driver, and of each worker with its descendants, by name."""
    found = {"driver": driver.memory_info().rss / 2**20}
    for registration in registered(run.logs):
        process = registration.process()
        if process is not None and registration.name != "driver":
            family = [process, *process.children(recursive=True)]
            found[registration.name] = sum(each.memory_info().rss for each in family) / 2**20
    return found


def measure(overrides: list[str], num_steps: int, folder: Path) -> list[dict[str, float]]:
    """Run the demo and return the memory after each step."""
    given = [*write_assets(folder / "assets"), *_SMALL, f"trainer.run_dir={folder}", "trainer.name=run"]
    command = ["train", str(DEMO_CONFIG), *given, f"trainer.total_steps={num_steps}", *overrides]
    run, rows = RunDir(folder / "run"), []
    process = subprocess.Popen([sys.executable, "-m", "tidemill_trainer", *command], stdout=sys.stderr)
    while process.poll() is None:
        time.sleep(0.2)
        num_done = len(run.read_metrics())
        if num_done > len(rows):  # a step that is shorter than the pause repeats the sample
            rows += [resident_mib(run, psutil.Process(process.pid))] * (num_done - len(rows))
    if process.returncode:
        raise RuntimeError(f"the run failed with status {process.returncode}; see {run.logs}")
    return rows[:-1]  # processes of the last one may have ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(overrides, arguments.steps, Path(folder))
    names = sorted(rows[-1])
    print("step  " + "".join(f"{name:>13}" for name in names))
    for step in range(10, len(rows) + 1, 10):
        print(f"{step:4}  " + "".join(f"{rows[step - 1].get(name, 0.0):13.1f}" for name in names))
    half = rows[len(rows) // 2 :]
    slopes = [100 * np.polyfit(range(len(half)), [row.get(name, 0.0) for row in half], 1)[0] for name in names]
    print("/100  " + "".join(f"{slope:13.1f}" for slope in slopes))


if __name__ == "__main__":
    main()
