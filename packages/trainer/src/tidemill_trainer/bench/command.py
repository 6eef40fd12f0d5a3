"""The command `tidemill bench`."""

import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tidemill_trainer.bench.lengths import parse_lengths
from tidemill_trainer.bench.page import page
from tidemill_trainer.bench.result import facts, measure
from tidemill_trainer.bench.shapes import write_inputs
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import read_config
from tidemill_trainer.inputs import Inputs
from tidemill_trainer.plan.model import count_model
from tidemill_trainer.progress import Progress
from tidemill_trainer.run_dir import RunDir

_LARGE = 100_000_000
"""Parameters from which a step takes too long on a CPU."""


def bench_config(path: Path, overrides: Sequence[str], *, num_steps: int, lengths: str | None) -> Config:
    """Read the configuration of a run, and leave out what is no step: validations, checkpoints and warm-up.

    Raises:
        ConfigError: the configuration or `lengths` is invalid (see `parse_lengths`).
    """
    if lengths is not None:
        overrides = [*overrides, f"rollout.response_lengths={parse_lengths(lengths)}"]
    made = write_inputs(read_config(Config, path, overrides), num_steps)
    config = read_config(Config, path, [*overrides, *made])
    has_name = any(override.partition("=")[0].strip() == "trainer.name" for override in overrides)
    trainer = replace(
        config.trainer,
        name=config.trainer.name if has_name else None,
        logger=(),
        save_batches=False,
        total_steps=num_steps,
        stop_at_accuracy=None,
        val_before_train=False,
        test_freq=0,
        save_freq=-1,
        save_samples=0,
    )
    return replace(
        config,
        data=replace(config.data, val_files=()),
        warmup=replace(config.warmup, max_steps=0),
        trainer=trainer,
    )


def fit(config: Config, inputs: Inputs, run: RunDir, progress: Progress, warmup: int, arguments: Sequence[str]) -> None:
    """Train as `tidemill train` does, and write the result, also of a run that stops after some of the steps."""
    import ray

    from tidemill_trainer.bench.sampler import Sampler
    from tidemill_trainer.cluster import Cluster
    from tidemill_trainer.gpus import engine_gpus, placed, training_gpus
    from tidemill_trainer.trainer import Trainer

    sizes = count_model(replace(config.model, lora=None))
    if sizes.total > _LARGE and config.trainer.ray_address is None and not torch.cuda.is_available():
        progress.warn(
            f"this machine has no GPU: a step with {sizes.total / 1e9:.1f} billion parameters may take hours; a "
            "benchmark for a CPU is: tidemill bench recipes/demo.toml --lengths 6"
        )
    lines: list[Mapping[str, Any]] = []
    ends_s: list[float] = []
    with Cluster(config, run, progress) as cluster, cluster.watch():
        cluster.wait_ready()
        gc.freeze()
        num_gpus = ray.cluster_resources().get("GPU", 0.0)
        config = placed(config, num_gpus)
        used = sum((engine_gpus(config, num_gpus) | training_gpus(config, num_gpus)).values())
        sampler = Sampler(cluster.watch.waits, run.logs)

        def note(line: Mapping[str, Any]) -> None:
            if line["step"] >= warmup:
                sampler.mark()
                lines.append(line)
                ends_s.append(time.perf_counter())

        run.listeners.append(note)
        try:
            with sampler:
                Trainer(config, cluster, inputs, run, progress).fit()
        finally:
            if len(lines) > 1:
                figures = measure(config, sizes, lines, ends_s, used)
                _write(facts(config, arguments, warmup, sampler) | figures, run, progress)


def _write(result: Mapping[str, Any], run: RunDir, progress: Progress) -> None:
    """Write `bench.json`, `bench.md` and `bench.log` to the folder of the run."""
    (run.path / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    text = page(result)
    (run.path / "bench.md").write_text(text)
    progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
    progress.info(f"the page is {run.path / 'bench.md'}", style="bold")
    progress.console.save_text(str(run.path / "bench.log"))
