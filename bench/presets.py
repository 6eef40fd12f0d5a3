"""Train the demo's task with each preset of recipes/, from the same warmed-up model, and print what each one reaches.

    python bench/presets.py [PRESET ...] [-- section.key=value ...]

Every preset sees the same problems, 512 episodes a step, in two optimizer steps each. It stops at an accuracy of 0.9.
The teacher of distillation has a longer warm-up on the correct responses.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
PRESETS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "ppo", "dapo", "gspo", "cispo", "opd", "distill_topk")
TUNED = {
    "ppo": ["critic.optimizer.lr=1e-3"],
    "dapo": ["algorithm.overlong_buffer_len=2"],  # of 6 tokens
    "cispo": ["optimizer.lr=2.5e-4"],
}
COMMON = ["warmup.max_steps=0", "actor.ppo_mini_batch_size=64", "optimizer.total_steps=400", "trainer.save_freq=0"]


def demo(folder: Path, name: str, *arguments: str) -> list[dict]:
    """Run `tidemill demo` and return its metrics."""
    command = [sys.executable, "-m", "tidemill_trainer", "demo", *arguments]
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run([*command, f"trainer.name={name}", f"trainer.run_dir={folder}"], stdout=log, check=True)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def newest_model(folder: Path, name: str, step: str = "*") -> Path:
    return max((folder / name / "checkpoints").glob(f"step_{step}/huggingface"))


def teacher_model(folder: Path) -> Path:
    """Return the teacher of all presets, a model with a longer warm-up."""
    if not (folder / "teacher").exists():
        longer = ["warmup.max_steps=4000", "warmup.until_accuracy=0.95"]
        rows = demo(folder, "teacher", "trainer.total_steps=1", "trainer.test_freq=1", *longer)
        accuracy = [row["val/accuracy"] for row in rows if row["phase"] == "sft" and "val/accuracy" in row][-1]
        print(f"accuracy of the teacher: {accuracy:.2f}", flush=True)
    return newest_model(folder, "teacher", "000000")


def main() -> None:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"one of {', '.join(PRESETS)} (default: all)")
    names, overrides = parser.parse_args(arguments[:split]).presets or list(PRESETS), arguments[split + 1 :]
    if unknown := set(names) - set(PRESETS):
        parser.error(f"unknown presets: {', '.join(sorted(unknown))}; the presets are {', '.join(PRESETS)}")
    folder = Path(tempfile.mkdtemp(prefix="presets-"))
    demo(folder, "warmup", "trainer.total_steps=1", "trainer.test_freq=1")
    model = newest_model(folder, "warmup", "000000")
    print(f"runs in {folder}\n{'preset':22} {'accuracy':>8} {'steps':>6} {'s/step':>7} {'seconds':>8}", flush=True)
    for name in names:
        extra = [*TUNED.get(name, [])]
        if name in ("opd", "distill_topk"):
            extra += [f"teacher.path={teacher_model(folder)}"]
        began = time.monotonic()
        limits = ["trainer.total_steps=200", f"model.path={model}"]
        rows = demo(folder, name, str(RECIPES / f"{name}.toml"), *COMMON, *limits, *extra, *overrides)
        steps = [row for row in rows if row["phase"] == "rl" and row["step"] > 0]
        accuracy = [row["val/accuracy"] for row in steps if "val/accuracy" in row][-1]
        times = sorted(row["perf/time_per_step"] for row in steps)
        seconds = time.monotonic() - began
        print(f"{name:22} {accuracy:8.2f} {len(steps):6} {times[len(times) // 2]:7.2f} {seconds:8.0f}", flush=True)


if __name__ == "__main__":
    main()
