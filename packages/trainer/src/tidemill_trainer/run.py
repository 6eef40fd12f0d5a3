"""The commands `tidemill demo`, `train`, `sft` and `eval`, from configuration to final message."""

import gc
import logging
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic

import torch
from rich.console import Console
from safetensors import SafetensorError
from tidemill_dispatch import CallTimeoutError, WorkerDiedError, WorkerError

from tidemill_trainer.checkpoints import HF_FOLDER, CheckpointError, Checkpoints
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, ConfigT, read_config
from tidemill_trainer.data import DataError
from tidemill_trainer.episodes import EpisodeError
from tidemill_trainer.evaluate import evaluate_run, evaluation_config
from tidemill_trainer.inputs import Inputs, load_inputs
from tidemill_trainer.loggers import open_loggers
from tidemill_trainer.logs import tail
from tidemill_trainer.mismatch import MismatchError
from tidemill_trainer.out_of_memory import DeviceMemoryError
from tidemill_trainer.preflight import check_model
from tidemill_trainer.progress import Progress
from tidemill_trainer.report import write_report
from tidemill_trainer.run_dir import RunDir, open_run
from tidemill_trainer.sft.config import SFTConfig
from tidemill_trainer.sft.inputs import SFTInputs, load_sft_inputs
from tidemill_trainer.stalls.process import is_engine, log_name
from tidemill_trainer.stalls.report import StallError

_INPUT_ERRORS = (ConfigError, DataError, CheckpointError)
_STOPPING_ERRORS = (EpisodeError, MismatchError)
_DESCRIBED_ERRORS = (DeviceMemoryError, WorkerError, WorkerDiedError, CallTimeoutError, StallError)


def demo(task: str, config_path: Path, overrides: Sequence[str]) -> int:
    """Run `tidemill demo`: create model and problems of a task in the folder of the run, and train on them."""
    progress = Progress()
    quiet_libraries()
    kind = SFTConfig if task == "sft" else Config
    try:
        config = read_config(kind, config_path, overrides)
        name = config.trainer.name or f"demo-{task}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(config.trainer.run_dir) / name
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(f"the folder {folder} exists already; choose another trainer.name") from None
        try:
            assets = _make_assets(task, folder / "assets", config.trainer.seed, progress)
            named = [] if config.trainer.name else [f"trainer.name={name}"]
            config = read_config(kind, config_path, [*assets, *overrides, *named])
        except BaseException:  # including Ctrl-C: an incomplete folder would block the next attempt
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except (ConfigError, OSError) as error:
        progress.fail(str(error))
        return 1
    if isinstance(config, SFTConfig):
        return _run(config, "demo", progress, _sft(config, progress))
    return _run(config, "demo", progress, _training(config, progress))


def _make_assets(task: str, folder: Path, seed: int, progress: Progress) -> list[str]:
    """Write model and problems to `folder`.

    Returns:
        Overrides that set their paths.

    Raises:
        OSError: writing failed, for example because the disk is full.
    """
    from tidemill_trainer.demo import write_assets

    try:
        with progress.waiting("creating a tiny Qwen3 and its problems"):
            return write_assets(folder, seed, task)
    except SafetensorError as error:
        raise OSError(f"cannot write the model of the demo to {folder}: {error}; check the free disk space") from error


def train(config_path: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Run `tidemill train CONFIG.toml`."""
    return _train(Config, _training, config_path, overrides, resume=resume)


def sft(config_path: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Run `tidemill sft CONFIG.toml`."""
    return _train(SFTConfig, _sft, config_path, overrides, resume=resume)


def evaluate(target: Path, overrides: Sequence[str], *, n: int, greedy: bool) -> int:
    """Run `tidemill eval CONFIG.toml|FOLDER`."""
    progress = Progress()
    quiet_libraries()
    try:
        config, stem = evaluation_config(target, overrides)
    except (ConfigError, CheckpointError, OSError) as error:
        progress.fail(str(error))
        return 1

    def prepare() -> Callable[[Config, RunDir], None]:
        inputs = load_inputs(config, progress, has_training=False)
        return lambda config, run: evaluate_run(config, inputs, run, progress, n=n, greedy=greedy)

    def how_to_repeat(run: RunDir) -> str:
        return f"The files of the evaluation are in {run.path}; the same command repeats it."

    return _run(config, stem, progress, _Work(prepare=prepare, after_stop=how_to_repeat))


def bench(
    config_path: Path,
    overrides: Sequence[str],
    *,
    steps: int,
    warmup: int,
    lengths: str | None,
    arguments: Sequence[str],
) -> int:
    """Run `tidemill bench [CONFIG.toml]`; `arguments` are those of the command."""
    from tidemill_trainer.bench.command import bench_config, fit

    progress = Progress(Console(record=True))
    quiet_libraries()
    try:
        config = bench_config(config_path, overrides, num_steps=warmup + steps, lengths=lengths)
    except (ConfigError, OSError) as error:
        progress.fail(str(error))
        return 1

    def prepare() -> Callable[[Config, RunDir], None]:
        inputs = load_inputs(config, progress)
        return lambda config, run: fit(config, inputs, run, progress, warmup, arguments)

    def how_to_repeat(run: RunDir) -> str:
        return f"The logs of the benchmark are in {run.logs}; the same command repeats it."

    return _run(
        config, f"bench-{Path(config.model.path).name}", progress, _Work(prepare=prepare, after_stop=how_to_repeat)
    )


def replay(
    target: Path, steps: tuple[int, int] | None, overrides: Sequence[str], *, has_generation: bool = False
) -> int:
    """Run `tidemill replay RUN`."""
    from tidemill_trainer.replay.plan import replay_config, replay_plan

    progress = Progress()
    quiet_libraries()
    try:
        plan = replay_plan(target, steps, overrides, has_generation=has_generation)
    except (ConfigError, CheckpointError, OSError) as error:
        progress.fail(str(error))
        return 1

    def prepare() -> Callable[[Config, RunDir], None]:
        check_model(plan.config)

        def repeat_steps(_config: Config, folder: RunDir) -> None:
            from tidemill_trainer.replay.steps import repeat  # imports Ray

            repeat(plan, folder, progress, has_generation=has_generation)

        return repeat_steps

    def how_to_repeat(folder: RunDir) -> str:
        return f"The logs of the replay are in {folder.logs}; the same command repeats it."

    return _run(replay_config(plan), "replay", progress, _Work(prepare=prepare, after_stop=how_to_repeat))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work(Generic[ConfigT]):
    """What a command does.

    Attributes:
        prepare: loads and checks all inputs before any process starts, and returns the work with a configuration, which
            may be for fewer nodes, in the folder of the run.
        after_stop: returns what the user can do after it stopped early.
    """

    prepare: Callable[[], Callable[[ConfigT, RunDir], None]]
    after_stop: Callable[[RunDir], str]


def _training(config: Config, progress: Progress) -> _Work[Config]:
    def prepare() -> Callable[[Config, RunDir], None]:
        inputs = load_inputs(config, progress)
        return lambda config, run: _fit(config, inputs, run, progress)

    saves = config.trainer.save_freq >= 0
    return _Work(prepare=prepare, after_stop=lambda run: run.how_to_continue("train", saves=saves))


def _sft(config: SFTConfig, progress: Progress) -> _Work[SFTConfig]:
    def prepare() -> Callable[[SFTConfig, RunDir], None]:
        inputs = load_sft_inputs(config, progress)
        return lambda config, run: _fit_sft(config, inputs, run, progress)

    saves = config.trainer.save_freq >= 0
    return _Work(prepare=prepare, after_stop=lambda run: run.how_to_continue("sft", saves=saves))


def _train(
    kind: type[ConfigT],
    work: Callable[[ConfigT, Progress], _Work[ConfigT]],
    config_path: Path,
    overrides: Sequence[str],
    *,
    resume: bool,
) -> int:
    progress = Progress()
    quiet_libraries()
    try:
        config = read_config(kind, config_path, overrides)
    except ConfigError as error:
        progress.fail(str(error))
        return 1
    return _run(config, config_path.stem, progress, work(config, progress), resume=resume)


def _run(config: ConfigT, stem: str, progress: Progress, work: _Work[ConfigT], *, resume: bool = False) -> int:
    """Do the work of a command; report any error as one message and return the exit status.

    An attempt in which a training worker dies is followed by another one, which resumes the run, at most
    `trainer.max_restarts` times; on fewer nodes, if some are lost.
    """
    torch.set_num_threads(config.actor.omp_num_threads)  # threads of a busy machine wait for each other
    run: RunDir | None = None
    num_restarts = 0
    current = config
    try:
        do = work.prepare()
        import_ray(config.trainer.ray_address)
        while True:
            try:
                with open_run(current, stem, resume=resume) as run:
                    if resume and run.newest_checkpoint() is None:  # before loggers read what they have received
                        run.begin(progress.warn)
                    with open_loggers(current, run, progress):
                        do(current, run)
                break
            except WorkerDiedError as error:
                if run is None or is_engine(error.group) or num_restarts >= config.trainer.max_restarts:
                    raise
                num_restarts += 1
                named = replace(config, trainer=replace(config.trainer, name=run.path.name))
                resume = _prepare_restart(
                    run, error, f"{num_restarts} of at most {config.trainer.max_restarts}", progress
                )
                current = _on_remaining_nodes(named, progress)
    except _INPUT_ERRORS as error:
        progress.fail(str(error))
        return 1
    except _STOPPING_ERRORS as error:
        assert run is not None
        progress.fail(f"{error}\n{work.after_stop(run)}")
        return 1
    except KeyboardInterrupt:
        if run is None:
            raise
        progress.stop(work.after_stop(run))
        return 130
    except Exception as error:  # noqa: BLE001 - top level: the user sees the message, a file gets the traceback
        progress.fail(_summary(error) + ("" if run is None else _details(error, run, work, progress)))
        return 1
    return 0


def _prepare_restart(run: RunDir, error: WorkerDiedError, number: str, progress: Progress) -> bool:
    """Report which worker died and where the run continues; return whether it has a checkpoint to resume from."""
    saved = run.newest_checkpoint()
    where = "from the beginning, because there is no checkpoint" if saved is None else f"after step {saved}"
    reason = str(error).splitlines()[0]
    progress.warn(f"{reason}. Restart {number} (trainer.max_restarts): the run continues {where}")
    if saved is None:
        run.begin(progress.warn)
    return saved is not None


def _on_remaining_nodes(config: ConfigT, progress: Progress) -> ConfigT:
    """Return the configuration with as many processes as the cluster still has room for, and report the changes."""
    if config.trainer.ray_address is None:
        return config
    from tidemill_trainer.ray_session import read_node_resources
    from tidemill_trainer.remaining_nodes import changes, fitted

    remaining = fitted(config, read_node_resources(config.trainer.ray_address))
    if changed := changes(config, remaining):
        progress.warn(f"the cluster has fewer nodes; the run continues with {changed}")
    return remaining


def import_ray(address: str | None) -> None:
    """Import Ray. If it starts on this machine (`address` is None), it listens on the loopback address alone.

    Ray has no argument for this, but a variable that it reads when it is imported.
    """
    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    is_ours = address is None and variable not in os.environ
    if is_ours:
        os.environ[variable] = "0"
    import ray  # noqa: F401

    if is_ours:
        del os.environ[variable]


def _fit(config: Config, inputs: Inputs, run: RunDir, progress: Progress) -> None:
    # Importing Ray takes a second, so errors in the inputs are reported before.
    from tidemill_trainer.cluster import Cluster
    from tidemill_trainer.trainer import Trainer

    if inputs.train is not None:
        run.check_data(inputs.train)
    with Cluster(config, run, progress) as cluster, cluster.watch():
        cluster.wait_ready()
        gc.freeze()  # otherwise full collections visit all objects that the imports created
        with _reported(run, progress):
            result = Trainer(config, cluster, inputs, run, progress).fit()
    change = "trained"
    if result.accuracy is not None and result.accuracy_before is not None:
        change = f"held-out accuracy went from {result.accuracy_before:.2f} to {result.accuracy:.2f}"
    progress.info(
        f"{change} in {result.steps} steps and {progress.seconds():.0f} s; the run is in {run.path}", style="bold"
    )


def _fit_sft(config: SFTConfig, inputs: SFTInputs, run: RunDir, progress: Progress) -> None:
    from tidemill_trainer.sft.cluster import SFTCluster
    from tidemill_trainer.sft.trainer import SFTTrainer

    run.check_data(inputs.train)
    with SFTCluster(config, run, progress) as cluster, cluster.watch():
        cluster.wait_ready()
        with _reported(run, progress):
            result = SFTTrainer(config, cluster, inputs, run, progress).fit()
    change = "trained"
    if result.loss is not None and result.loss_before is not None:
        change = f"validation loss went from {result.loss_before:.3f} to {result.loss:.3f}"
    folder = run.path
    if config.trainer.save_freq >= 0:
        folder = Checkpoints(run.checkpoints, max_to_keep=1).path(result.steps) + f"/{HF_FOLDER}"
    done = f"{change} in {result.steps} steps and {progress.seconds():.0f} s"
    progress.info(f"{done}; the {'run' if folder == run.path else 'model'} is in {folder}", style="bold")


@contextmanager
def _reported(run: RunDir, progress: Progress) -> Iterator[None]:
    """Write the report of a run after the block, also after an error."""
    try:
        yield
    finally:
        try:
            write_report(run)
        except Exception as error:  # noqa: BLE001 - the training, or the error that stopped it, is more important
            progress.warn(f"cannot write the report: {type(error).__name__}: {error}")


def _summary(error: Exception) -> str:
    """Return the message of an error without a remote traceback."""
    text = str(error).split("remote traceback", 1)[0].rstrip()
    return text if isinstance(error, _DESCRIBED_ERRORS) else f"{type(error).__name__}: {text}"


def _details(error: Exception, run: RunDir, work: _Work, progress: Progress) -> str:
    """Write the traceback to a file of the run; return where it is and what the user can do."""
    file = run.logs / "error.log"
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(traceback.format_exception(error)))
    except OSError as problem:
        progress.warn(f"cannot write {file}: {problem}")
        return ""
    last = ""
    if isinstance(error, WorkerDiedError) and (lines := tail(run.logs / f"{log_name(error.group, error.rank)}.log", 8)):
        last = f"\nLast lines of its log:\n{lines}"
    return f"{last}\nThe traceback is in {file}, next to the logs of the workers.\n{work.after_stop(run)}"


def quiet_libraries() -> None:
    """Silence the output of libraries on the terminal."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # torch warns about an internal rename when a process creates its first nested tensor.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
