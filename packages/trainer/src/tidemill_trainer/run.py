"""A run from configuration to closing sentence."""

import logging
import shutil
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from tidemill_dispatch import CallTimeoutError, WorkerDiedError, WorkerError

from tidemill_trainer.checkpoints import CheckpointError
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.data import DataError
from tidemill_trainer.inputs import Inputs, load_inputs
from tidemill_trainer.logs import tail
from tidemill_trainer.progress import Progress
from tidemill_trainer.report import write_report
from tidemill_trainer.rewards import RewardError
from tidemill_trainer.run_dir import RunDir, open_run

_INPUT_ERRORS = (ConfigError, DataError, CheckpointError, RewardError)
_WORKER_ERRORS = (WorkerError, WorkerDiedError, CallTimeoutError)


def demo(config_path: Path, overrides: Sequence[str]) -> int:
    """`tidemill demo`: makes model and problems in the run's own folder and trains on them."""
    progress = Progress()
    _quiet_libraries()
    try:
        config = load_config(config_path, overrides)
        name = config.trainer.name or f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(config.trainer.run_dir) / name
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(f"{folder} exists; choose another trainer.name") from None
        try:
            assets = _make_assets(folder / "assets", config.trainer.seed, progress)
            config = load_config(config_path, [*assets, *overrides, f"trainer.name={name}"])
        except BaseException:  # Ctrl-C, too: half of it would be in the way of the next try
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except (ConfigError, OSError) as error:
        progress.fail(str(error))
        return 1
    return _run(config, "demo", progress, resume=False)


def _make_assets(folder: Path, seed: int, progress: Progress) -> list[str]:
    """Returns the overrides that point at them; raises OSError, of a full disk for example."""
    from tidemill_trainer.demo import write_assets

    try:
        with progress.waiting("making a tiny Qwen3 and its problems"):
            return write_assets(folder, seed)
    except SafetensorError as error:
        raise OSError(f"the demo's model could not be written to {folder}: {error}") from error


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


def _run(config: Config, stem: str, progress: Progress, *, resume: bool) -> int:
    """Runs, and reports whatever goes wrong as one message; returns the exit status."""
    run: RunDir | None = None
    try:
        inputs = load_inputs(config, progress)
        with open_run(config, stem, resume=resume) as run:
            _fit(config, inputs, run, progress)
    except _INPUT_ERRORS as error:
        hint = f"\n{run.how_to_continue()}" if run is not None and isinstance(error, RewardError) else ""
        progress.fail(f"{error}{hint}")
        return 1
    except KeyboardInterrupt:
        if run is None:
            raise
        progress.stop(run.how_to_continue())
        return 130
    except Exception as error:  # noqa: BLE001 - the top of the program: the message goes to the user, the rest to a file
        progress.fail(_summary_of(error) + _details(error, run, progress))
        return 1
    return 0


def _fit(config: Config, inputs: Inputs, run: RunDir, progress: Progress) -> None:
    # Importing Ray takes a second, which a mistake in the inputs should not cost.
    from tidemill_trainer.cluster import Cluster
    from tidemill_trainer.trainer import Trainer

    with Cluster(config, run, progress) as cluster:
        cluster.wait_ready()
        try:
            result = Trainer(config, cluster, inputs, run, progress).fit()
        finally:
            try:
                write_report(run)
            except OSError as error:  # a full disk, say: it must not hide why the training ended
                progress.warn(f"the report could not be written: {error}")
    learnt = ""
    if result.accuracy is not None and result.accuracy_before is not None:
        learnt = f"held-out accuracy went from {result.accuracy_before:.2f} to {result.accuracy:.2f} "
    progress.say(
        f"{learnt}in {result.steps} steps and {progress.seconds():.0f} s; the run is in {run.path}", style="bold"
    )


def _summary_of(error: Exception) -> str:
    """What an error says, without a remote traceback."""
    text = str(error).split("remote traceback", 1)[0].rstrip()
    return text if isinstance(error, _WORKER_ERRORS) else f"{type(error).__name__}: {text}"


def _details(error: Exception, run: RunDir | None, progress: Progress) -> str:
    """Keeps the whole error in a file of the run, and says where, and how to go on."""
    if run is None:
        return ""
    file = run.logs / "error.log"
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(traceback.format_exception(error)))
    except OSError as problem:
        progress.warn(f"{file} could not be written: {problem}")
        return ""
    last = ""
    if isinstance(error, WorkerDiedError) and (lines := tail(run.logs / f"{error.group}_{error.rank}.log", 8)):
        last = f"\nIts last output:\n{lines}"
    return f"{last}\nThe whole error is in {file}, the workers' output beside it.\n{run.how_to_continue()}"


def _quiet_libraries() -> None:
    """Keeps the terminal for the run's own lines."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # torch warns about an internal renaming each time a process makes its first ragged tensor.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
