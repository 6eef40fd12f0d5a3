"""The same training with tidemill and with verl, one after the other on the same GPUs, phases side by side.

    python bench/verl.py --verl-path FOLDER [--verl-python PYTHON] [--verl key=value ...] [--folder FOLDER]
        [--tidemill RUN] [--steps 5] [--warmup 2] [--lengths LENGTHS] [CONFIG.toml] [section.key=value ...]

First `tidemill bench` runs with CONFIG.toml (default: its own) and the overrides. Then verl trains a model of the same
sizes on the same problems in the same order, with the reward function, batch, learning rate and SGLang arguments of
that run; each of its responses is as long as tidemill's. verl has an environment of its own: --verl-path is a folder
with verl and what it imports, which precedes PYTHONPATH, and --verl-python its interpreter. --tidemill reuses the
folder of an earlier `tidemill bench` instead of a new run.

verl's settings are the fastest that were found for a model of 0.6B on one H200, where engine and trainer stay in
memory, with micro-batches of fewer tokens for a wider model; --verl replaces them. On a GPU of 80 GB, for example, the
engine has to free its memory during the update:

    --verl actor_rollout_ref.rollout.free_cache_engine=True --verl actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    --verl actor_rollout_ref.rollout.engine_kwargs.sglang.enable_memory_saver=True

tidemill computes no log-probs before the update if a batch has one optimizer step; verl does, unless it takes those of
the rollout, which are not quite the same: --verl algorithm.rollout_correction.bypass_mode=True.

A step lasts from the end of the one before to its own end. The table is printed and written to `verl.txt`, and all
steps to `verl.json`, in --folder, with both runs; also if verl is stopped after some of the steps. In verl's
generation, responses are looked for every 0.1 s, instead of every 2 s.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import read_config
from tidemill_trainer.run_dir import RunDir
from verl.inputs import HOOKS, check, overridden, verl_settings, write_model, write_problems
from verl.result import table, tidemill_steps, verl_steps, warnings

PACKAGES = ("verl", "sglang", "torch", "transformers", "ray", "tensordict", "liger-kernel", "flash-attn")
VERSIONS = f"""
import importlib.metadata, json
found = dict.fromkeys({PACKAGES})
for name in found:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a command in a session of its own; interrupt it if the block is left before it ends."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_tidemill(arguments: Sequence[str], folder: Path) -> Path:
    """Run `tidemill bench` and return the folder of its run."""
    command = [sys.executable, "-m", "tidemill_trainer", "bench", *arguments]
    with child([*command, f"trainer.run_dir={folder}", "trainer.name=tidemill"]) as process:
        if process.wait():
            sys.exit(f"tidemill bench failed with status {process.returncode}")
    return folder / "tidemill"


def run_verl(
    python: str, settings: Sequence[str], folder: Path, env: Mapping[str, str], steps: list[dict[str, Any]]
) -> None:
    """Train with verl and append its metrics of each step to `steps`, with the time of its end as "end_s"."""
    metrics, log = folder / "metrics.jsonl", folder / "log.txt"
    metrics.touch()
    command = [python, "-W", "ignore", "-m", "verl.trainer.main_ppo", *settings]
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    print(f"verl's log is {log}", flush=True)
    began = time.monotonic()
    with (
        log.open("wb") as output,
        metrics.open() as lines,
        child(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        is_running, text = True, ""
        while is_running:
            is_running = process.poll() is None
            time.sleep(0.02)
            text += lines.read()
            *complete, text = text.split("\n")
            for row in map(json.loads, complete):
                if "timing_s/step" in row["data"]:
                    steps.append({"step": row["step"], "end_s": time.monotonic() - began, **row["data"]})
                    print(f"verl: step {row['step']} after {steps[-1]['end_s']:.0f} s", flush=True)
        if process.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            sys.exit(f"{tail}\nverl failed with status {process.returncode}; its log is {log}")


def environment(arguments: argparse.Namespace, metrics: Path) -> dict[str, str]:
    """Return the environment variables of verl's processes."""
    folders = [arguments.verl_path and str(arguments.verl_path.absolute()), str(HOOKS), os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "SGLANG_FORCE_STREAM_INTERVAL": str(2**31),  # as with tidemill: only complete responses
    }


def versions(python: str, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return the versions of packages in an environment."""
    return json.loads(subprocess.run([python, "-c", VERSIONS], env=env, capture_output=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--verl-path", type=Path)
    parser.add_argument("--verl-python", default=sys.executable)
    parser.add_argument("--verl", action="append", default=[], metavar="key=value")
    parser.add_argument("--folder", type=Path, default=Path("runs") / time.strftime("verl-%Y%m%d-%H%M%S"))
    parser.add_argument("--tidemill", type=Path, metavar="RUN")
    arguments, others = parser.parse_known_args()
    if arguments.tidemill and others:
        parser.error(f"--tidemill takes the configuration of an earlier run; remove {shlex.join(others)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = arguments.folder.absolute()
    work = folder / "verl"
    work.mkdir(parents=True)
    env = environment(arguments, work / "metrics.jsonl")
    found = {"tidemill": versions(sys.executable, os.environ), "verl": versions(arguments.verl_python, env)}
    if found["verl"]["verl"] is None:
        sys.exit(f"verl is not installed for {arguments.verl_python}; give --verl-path or --verl-python")

    run = RunDir(arguments.tidemill or run_tidemill(others, folder))
    config = read_config(Config, run.config, has_gpu=False)  # the file has all keys
    bench = json.loads((run.path / "bench.json").read_text())
    check(config)
    num_steps = bench["steps"][-1]["step"]
    is_text = write_problems(config, num_steps, work / "problems.parquet")
    # In a process of its own, which leaves nothing on the GPU.
    model = (Path(config.model.path), work / "model", config.model.init_seed, is_text)
    writer = multiprocessing.get_context("spawn").Process(target=write_model, args=model)
    writer.start()
    writer.join()
    if writer.exitcode:
        sys.exit(f"the model of {run.path} could not be written to {work / 'model'}")
    (work / "loops.yaml").write_text("- name: fixed_length\n  _target_: verl_hooks.FixedLengthLoop\n")
    settings = verl_settings(config, work, num_steps, max(1, round(bench["num_gpus"])))
    facts = {
        "command": shlex.join(sys.argv),
        "tidemill command": bench["command"],
        "date": time.strftime("%Y-%m-%d"),
        "commit": bench["commit"],
        "machine": bench["machine"],
        "versions": found,
    }
    rows: list[dict[str, Any]] = []
    try:
        run_verl(arguments.verl_python, overridden(settings, arguments.verl), work, env, rows)
    finally:
        if len(rows) > bench["warmup_steps"]:
            steps = {"tidemill": tidemill_steps(run, bench), "verl": verl_steps(rows, bench["warmup_steps"])}
            report(folder, facts, steps)


def report(folder: Path, facts: Mapping[str, Any], steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print the table, and write it and all steps to `folder`."""
    (folder / "verl.json").write_text(json.dumps({**facts, **steps}, indent=1) + "\n")
    lines = [f"{facts['date']}, commit {facts['commit']}, {facts['machine'].get('gpu', 'no GPU')}", *table(**steps)]
    lines += warnings(**steps)
    for name, version in facts["versions"]["verl"].items():
        ours = facts["versions"]["tidemill"][name]
        lines.append(f"{name} {version}" + ("" if ours in (None, version) else f" with verl, {ours} with tidemill"))
    (folder / "verl.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
