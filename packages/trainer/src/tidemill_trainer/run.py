"""A run from configuration to closing sentence."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from ray.exceptions import RayError
from tidemill_dispatch import CallTimeoutError, WorkerDiedError, WorkerError

from tidemill_trainer.checkpoints import CheckpointError
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.data import DataError, load_prompts
from tidemill_trainer.progress import Progress
from tidemill_trainer.rewards import RewardError, load_reward
from tidemill_trainer.run_dir import RunDir, open_run
from tidemill_trainer.trainer import Result, Trainer

_INPUT_ERRORS = (ConfigError, DataError, CheckpointError, RewardError)
_WORKER_ERRORS = (WorkerError, WorkerDiedError, CallTimeoutError, RayError)


def demo(config_path: Path, overrides: Sequence[str]) -> int:
    """`tidemill demo`: makes model and problems in the run's own folder and trains on them."""
    from tidemill_trainer.demo import write_assets

    progress = Progress()
    _quiet_libraries()
    try:
        config = load_config(config_path, overrides)
        name = config.trainer.name or f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(config.trainer.run_dir) / name
        with progress.waiting("making a tiny Qwen3 and its problems"):
            assets = write_assets(folder / "assets", config.trainer.seed)
        config = load_config(config_path, [*assets, *overrides, f"trainer.name={name}"])
    except _INPUT_ERRORS as error:
        progress.fail(str(error))
        return 1
    return _run(config, "demo", progress, resume=False)


def train(config_path: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """`tidemill train CONFIG.toml`."""
    progress = Progress()
    _quiet_libraries()
    try:
        config = load_config(config_path, overrides)
    except ConfigError as error:
        progress.fail(str(error))
        return 1
    return _run(config, config_path.stem, progress, resume=resume)


def _quiet_libraries() -> None:
    """Keeps the terminal for the run's own lines."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # torch warns about an internal renaming each time a process makes its first ragged tensor.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _run(config: Config, stem: str, progress: Progress, *, resume: bool) -> int:
    """Runs and reports errors as one message; returns the exit status."""
    run: RunDir | None = None
    try:
        load_reward(config.reward.function)
        run = open_run(config, stem, resume=resume)
        result = fit(config, run, progress)
    except _INPUT_ERRORS as error:
        progress.fail(str(error))
        return 1
    except _WORKER_ERRORS as error:
        assert run is not None
        run.logs.mkdir(parents=True, exist_ok=True)
        (run.logs / "error.log").write_text(str(error))
        progress.fail(
            f"{summary_of(error)}\nThe whole error is in {run.logs / 'error.log'}, the workers' output beside it."
        )
        return 1
    progress.say(closing_sentence(result, run, progress.seconds()))
    return 0


def fit(config: Config, run: RunDir, progress: Progress) -> Result:
    """Starts the cluster, trains, ends the cluster and writes the report.

    Raises:
        ConfigError, DataError, RewardError, CheckpointError: something the user can mend.
        WorkerError, WorkerDiedError, CallTimeoutError: a worker failed.
    """
    from transformers import AutoTokenizer

    from tidemill_trainer.cluster import Cluster
    from tidemill_trainer.report import write_report

    with Cluster(config, run, progress) as cluster:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        datasets = []
        for files in (config.data.train_files, config.data.val_files):
            if files or not datasets:
                dataset, num_skipped = load_prompts(files, tokenizer, config.data)
                if num_skipped:
                    progress.warn(f"left out {num_skipped} problems of {', '.join(files)} with too long a prompt")
                datasets.append(dataset)
        cluster.wait_ready()
        trainer = Trainer(
            config, cluster, tokenizer, datasets[0], datasets[1] if len(datasets) > 1 else None, run, progress
        )
        try:
            return trainer.fit()
        finally:
            write_report(run)


def summary_of(error: Exception) -> str:
    """The lines of an error before the remote traceback."""
    return str(error).split("remote traceback", 1)[0].rstrip()


def closing_sentence(result: Result, run: RunDir, seconds: float) -> str:
    """The run in one sentence."""
    learnt = ""
    if result.accuracy is not None and result.accuracy_before is not None:
        learnt = f"held-out accuracy went from {result.accuracy_before:.2f} to {result.accuracy:.2f} "
    return f"[bold]{learnt}in {result.steps} steps and {seconds:.0f} s; the run is in {run.path}[/]"
