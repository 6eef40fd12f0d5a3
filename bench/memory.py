"""Memory of each process of a run, and of each GPU, step by step.

    python bench/memory.py [--steps 120] [section.key=value ...]            the demo's model on a CPU
    python bench/memory.py --model qwen3-0.6b [--lengths lognormal:100,512] [section.key=value ...]

prints a row for every step: MiB of resident memory of the driver, of each worker and of the processes that it started
("rollout_0 sglang::scheduler"; those of one name together), on GPUs also the memory in use and the most that a training
worker allocated for tensors in that step; then the growth per 100 steps, which is the slope of a line through the
second half of the steps. The first half has compilation, caches and the allocator's arenas. --model is a model of
`tidemill bench`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
from tidemill_trainer.bench.sampler import gpu_handles
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
    """Return the resident memory of the driver, of each worker, and of its descendants by their names."""
    found = defaultdict[str, float](float, driver=driver.memory_info().rss / 2**20)
    for registration in registered(run.logs):
        process = registration.process()
        if process is not None and registration.name != "driver":
            found[registration.name] = process.memory_info().rss / 2**20
            for child in process.children(recursive=True):
                found[f"{registration.name} {child.name()}"] += child.memory_info().rss / 2**20
    return found


def command(model: str | None, lengths: str, num_steps: int, folder: Path) -> list[str]:
    """Return the command of the run, without the overrides of the user."""
    place = [f"trainer.run_dir={folder}", "trainer.name=run"]
    if model is not None:
        return ["bench", f"--steps={num_steps}", "--warmup=1", f"--lengths={lengths}", f"model.path={model}", *place]
    given = [*write_assets(folder / "assets"), *_SMALL, f"trainer.total_steps={num_steps}"]
    return ["train", str(DEMO_CONFIG), *given, *place]


def measure(arguments: list[str], folder: Path) -> list[dict[str, float]]:
    """Run the command and return the memory after each step."""
    run, rows, gpus = RunDir(folder / "run"), [], gpu_handles()
    process = subprocess.Popen([sys.executable, "-m", "tidemill_trainer", *arguments], stdout=sys.stderr)
    while process.poll() is None:
        time.sleep(0.2)
        lines = run.read_metrics()
        if len(lines) > len(rows):  # a step that is shorter than the pause repeats the sample
            row = resident_mib(run, psutil.Process(process.pid))
            row |= {f"gpu_{number}": used() / 2**20 for number, used in enumerate(gpus)}
            if "perf/max_memory_allocated_gb" in lines[-1] and gpus:
                row["tensors"] = lines[-1]["perf/max_memory_allocated_gb"] * 1024
            rows += [row] * (len(lines) - len(rows))
    if process.returncode:
        raise RuntimeError(f"the run failed with status {process.returncode}; its output is above")
    return rows[:-1]  # processes of the last one may have ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--model")
    parser.add_argument("--lengths", default="lognormal:100,512")
    arguments, overrides = parser.parse_known_args()
    if arguments.steps < 4:  # the last one is left out, and the slope needs two in the second half
        parser.error(f"--steps must be >= 4, got {arguments.steps}")
    with tempfile.TemporaryDirectory() as folder:
        given = command(arguments.model, arguments.lengths, arguments.steps, Path(folder))
        rows = measure([*given, *overrides], Path(folder))
    names = sorted(rows[-1])
    widths = [max(9, len(name)) + 2 for name in names]
    half = rows[len(rows) // 2 :]
    slope = {name: 100 * np.polyfit(range(len(half)), [row.get(name, 0.0) for row in half], 1)[0] for name in names}
    print("step" + "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    for label, row in [*enumerate(rows, 1), ("/100", slope)]:
        values = (f"{row.get(name, 0.0):{width}.1f}" for name, width in zip(names, widths, strict=True))
        print(f"{label:>4}" + "".join(values))


if __name__ == "__main__":
    main()
