"""The command `tidemill eval`: run the validation problems through the episodes of a configuration."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from tidemill_engines.location import download, is_url, sizes, split

from tidemill_trainer.algorithm_config import RewardModelConfig
from tidemill_trainer.checkpoints import HF_FOLDER, CheckpointError, Checkpoints, is_complete
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, is_sft_config, load_config
from tidemill_trainer.inputs import Inputs
from tidemill_trainer.progress import Progress
from tidemill_trainer.rewards import has_own_reward
from tidemill_trainer.run_dir import RunDir

if TYPE_CHECKING:
    from tidemill_trainer.rollout.episode_task import Episodes


def evaluation_config(target: Path, overrides: Sequence[str]) -> tuple[Config, str]:
    """Return the configuration for an evaluation and the start of its folder's name.

    It has the name of the overrides instead of that of the training run, and no loggers.

    Args:
        target: a configuration file, the folder of a run (its newest checkpoint), or the folder of a checkpoint.
        overrides: `key=value` overrides.

    Raises:
        ConfigError: there is no such configuration or checkpoint, or it has no validation files.
        CheckpointError: the checkpoint is at a URL and cannot be read.
    """
    if not target.exists() and target.suffix != ".toml":
        raise ConfigError(f"{target.absolute()} does not exist; give the folder of a run or a config file")
    if target.is_dir():
        target = Path(os.path.abspath(target))  # "." and ".." have no name
        is_run = (target / "config.toml").is_file()
        run = RunDir(target if is_run else target.absolute().parent.parent)
        step = run.newest_checkpoint()
        if is_run and step is None:
            raise ConfigError(f"the run {target} has no checkpoint to evaluate; choose another one")
        checkpoint = str(target)
        if is_run and step is not None:
            checkpoint = Checkpoints(run.checkpoints, max_to_keep=1).path(step)
        model = f"{checkpoint}/{HF_FOLDER}"
        if not run.config.is_file() or not is_complete(checkpoint):
            raise ConfigError(
                f"expected the folder of a run or of one of its checkpoints, got {target}; a checkpoint is "
                "runs/NAME/checkpoints/step_..."
            )
        if is_url(model):
            model = _downloaded(model, run.path / "downloads" / split(checkpoint)[1])
        if is_sft_config(run.config):
            raise ConfigError(
                f"{run.path} is a run of `tidemill sft`, whose configuration has no episodes; evaluate its checkpoint "
                f"with a configuration of `tidemill train`: tidemill eval CONFIG model.path={model}"
            )
        config = load_config(run.config, [f"model.path={model}", *overrides])
        stem = f"eval-{run.path.name}-{split(checkpoint)[1]}"
    else:
        config = load_config(target, overrides)
        stem = f"eval-{target.stem}"
    if not config.data.val_files:
        raise ConfigError("an evaluation requires data.val_files; set them")
    if not has_own_reward(config):
        raise ConfigError(
            "an evaluation measures the accuracy with a reward function, and runs no reward model; set reward.function"
        )
    has_name = any(override.partition("=")[0].strip() == "trainer.name" for override in overrides)
    name = config.trainer.name if has_name else None
    return replace(
        config,
        model=replace(config.model, init_seed=None),
        rollout=replace(
            config.rollout, quantization=None, engine_args=_without_load_format(config.rollout.engine_args)
        ),
        warmup=replace(config.warmup, max_steps=0),
        reward_model=RewardModelConfig(),
        trainer=replace(config.trainer, name=name, checkpoint_dir=None, logger=(), stop_at_accuracy=None),
    ), stem


def _without_load_format(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without "dummy" weights, of an engine that receives its weights before it generates."""
    return {key: value for key, value in engine_args.items() if (key, value) != ("load_format", "dummy")}


def _downloaded(url: str, folder: Path) -> str:
    """Download a model, in place of an earlier download."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        download(url, sizes(url), folder)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    return str(folder)


def evaluate_run(config: Config, inputs: Inputs, run: RunDir, progress: Progress, *, n: int, greedy: bool) -> None:
    """Run `n` episodes for each validation problem, and write their results (see `write_results`).

    Args:
        config: result of `evaluation_config`.
        inputs: tokenizer and problems.
        run: folder for results, episodes and logs.
        progress: terminal output.
        n: samples per problem.
        greedy: decode greedily; otherwise with `rollout.temperature`, `top_p` and `top_k`, and the run's seed.

    Raises:
        EpisodeError: more episodes failed than `episode.max_error_share`.
    """
    from tidemill_trainer.cluster import Cluster
    from tidemill_trainer.data import HELD_OUT, to_problems
    from tidemill_trainer.rollout.episode_task import EpisodeTask
    from tidemill_trainer.rollouts import sampling_seeds

    assert inputs.val is not None
    problems = to_problems(inputs.val, "eval", ordinal=HELD_OUT)
    seeds = sampling_seeds([config.trainer.seed, 0], len(problems) * n)
    tasks = [
        EpisodeTask(number=number, problem=problems[number // n], sample=number % n, seed=seed, is_shown=True)
        for number, seed in enumerate(seeds)
    ]
    with Cluster(config, run, progress, has_training=False) as cluster, cluster.watch():
        cluster.wait_ready()
        with cluster.watch.waits("load"):
            cluster.episodes.load(config)
        with cluster.watch.waits("testing"), progress.waiting(f"running {len(tasks)} episodes"):
            episodes = cluster.episodes.wait(cluster.episodes.start(tasks, greedy=greedy))
    write_results(config, inputs, run, progress, episodes, n=n, greedy=greedy)


def write_results(
    config: Config, inputs: Inputs, run: RunDir, progress: Progress, episodes: "Episodes", *, n: int, greedy: bool
) -> None:
    """Print the results of an evaluation, and write them to `results.json` and its episodes to `rollouts.jsonl`.

    Raises:
        EpisodeError: more episodes failed than `episode.max_error_share`; the results of the others are written.
    """
    from tidemill_trainer.episode_record import episode_record
    from tidemill_trainer.evaluation import evaluate_summaries
    from tidemill_trainer.rollouts import check_errors

    results = evaluate_summaries(episodes.summaries, n)
    run.remove_after(-1)  # an earlier evaluation of this name
    records = (episode_record(summary, episodes.rows, inputs.tokenizer) for summary in episodes.summaries)
    run.append_rollouts({"step": 0, **record} for record in records)
    sampling = "greedy" if greedy else f"temperature {config.rollout.temperature:g}"
    content = {"model": config.model.path, "n": n, "sampling": sampling, "results": results}
    (run.path / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    progress.console.print(_table(results, escape(f"{config.model.path}, {sampling}")))
    check_errors(episodes.summaries, "the evaluation", config.episode.max_error_share, progress)
    progress.info(f"the evaluation is in {run.path}", style="bold")


def _table(results: dict[str, dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("data source", "metric", "mean", "95 % interval", "problems", "failed"):
        table.add_column(name, justify="left" if name in ("data source", "metric") else "right", overflow="fold")
    for source, group in results.items():
        failed = f"{group['num_failed']} of {group['num_episodes']}"
        names = sorted((name for name in group if "@" in name), key=_order)
        if not names:
            table.add_row(escape(source), "", "", "", "0", failed)
        for name in names:
            found = group[name]
            interval = f"{found['low']:.3f} to {found['high']:.3f}"
            table.add_row(escape(source), name, f"{found['mean']:.3f}", interval, str(found["num_problems"]), failed)
        table.add_section()
    return table


def _order(name: str) -> tuple[str, int]:
    kind, _, number = name.partition("@")
    return kind, int(number)
