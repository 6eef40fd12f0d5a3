"""Loading of everything that a configuration refers to: tokenizer, problems and the user's functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill_dataproto import DataProto
from tidemill_engines.config import OptimizerConfig
from transformers import PreTrainedTokenizerBase

from tidemill_trainer.config import Config
from tidemill_trainer.data import DataError, load_prompts
from tidemill_trainer.doctor.machine import check_machine
from tidemill_trainer.episodes import create_episode
from tidemill_trainer.preflight import check_model
from tidemill_trainer.progress import Progress
from tidemill_trainer.rewards import has_own_episode, needs_ground_truth
from tidemill_trainer.role_checks import check_roles
from tidemill_trainer.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Tokenizer and problems of a run, loaded and checked before any process starts.

    Attributes:
        train: training problems; None for an evaluation.
        val: validation problems; None without validation files.
    """

    tokenizer: PreTrainedTokenizerBase
    train: DataProto | None
    val: DataProto | None


def load_inputs(config: Config, progress: Progress, *, has_training: bool = True) -> Inputs:
    """Check model, machine and the user's functions, and load tokenizer and problems.

    Args:
        config: configuration of the run.
        progress: terminal output.
        has_training: load the training files, too.

    Raises:
        ConfigError, DataError: a user error (reported without a traceback).
    """
    check_machine(config, progress)
    check_model(config)
    create_episode(config)  # raises here if it cannot be loaded; the episode workers load it again
    if config.reward.function is not None and has_own_episode(config):  # "endpoint" is refused there
        progress.warn(
            f'reward.function="{config.reward.function}" is ignored: episode.function="{config.episode.function}" '
            "returns the reward itself; remove reward.function"
        )
    tokenizer = load_tokenizer(config.model)
    check_roles(config, tokenizer)

    def load(files: Sequence[str]) -> DataProto:
        return _load_problems(files, tokenizer, config, progress)

    val_data = load(config.data.val_files) if config.data.val_files else None
    if not has_training:
        return Inputs(tokenizer=tokenizer, train=None, val=val_data)
    train_data = load(config.data.train_files)
    if config.warmup.max_steps > 0 and any(text is None for text in train_data.non_tensor_batch["response"]):
        raise DataError(
            "the warm-up requires a `response` in every row of data.train_files; add it, or set warmup.max_steps=0"
        )
    _warn_about_sizes(config, len(train_data), progress)
    return Inputs(tokenizer=tokenizer, train=train_data, val=val_data)


def _warn_about_sizes(config: Config, num_problems: int, progress: Progress) -> None:
    """Warn about valid but suspicious settings."""
    prompts, files = config.data.train_batch_size, config.data.train_files
    if len({*files}) < len(files):
        progress.warn("data.train_files has a file more than once: each step may contain its problems several times")
    if common := sorted({*files} & {*config.data.val_files}):
        progress.warn(f"the validation has problems of the training: {', '.join(common)} is in data.val_files, too")
    if prompts > num_problems:
        progress.warn(
            f"data.train_batch_size={prompts} is larger than the {num_problems} training problems: "
            "each step contains some problems more than once"
        )
    size = config.actor.ppo_mini_batch_size
    if size is not None and prompts % size:
        progress.warn(
            f"actor.ppo_mini_batch_size={size} does not divide data.train_batch_size={prompts}: the last optimizer "
            f"step of each epoch has {prompts % size} prompts, and the same learning rate"
        )
    total, without_policy = config.trainer.total_steps, config.critic.warmup_steps
    if without_policy >= total:
        progress.warn(
            f"critic.warmup_steps={without_policy} is not less than trainer.total_steps={total}: the policy is never "
            "trained"
        )
    mini_batches = 1 if size is None else -(-prompts // size)
    num_steps = max(total - without_policy, 0) * config.actor.ppo_epochs * mini_batches
    _warn_about_schedule("optimizer", config.optimizer, num_steps, progress)
    num_steps = total * config.critic.ppo_epochs * mini_batches
    _warn_about_schedule("critic.optimizer", config.critic.optimizer, num_steps, progress)


def _warn_about_schedule(key: str, optimizer: OptimizerConfig, num_steps: int, progress: Progress) -> None:
    """Warn about a learning rate that does not reach its peak or that is 0 before the end of the run, and about keys
    without effect.

    A schedule that is longer than the run is not warned about, nor one that ends above 0.
    """
    scheduler = optimizer.lr_scheduler
    unused = ["lr_decay_steps"] if scheduler != "wsd" else []
    unused += ["total_steps", "min_lr_ratio"] if scheduler == "constant" else []
    if given := [f"{key}.{name}" for name in unused if getattr(optimizer, name)]:
        progress.warn(f'no effect with {key}.lr_scheduler="{scheduler}": {", ".join(given)}')
    if optimizer.lr_warmup_steps > num_steps:
        progress.warn(
            f"{key}.lr_warmup_steps={optimizer.lr_warmup_steps} is larger than the {num_steps} optimizer steps of "
            f"the run: the learning rate never reaches {key}.lr"
        )
    end = None if scheduler == "constant" else optimizer.total_steps
    if end is not None and end < num_steps and optimizer.min_lr_ratio == 0:
        progress.warn(
            f"{key}.total_steps={end} is less than the {num_steps} optimizer steps of the run: the learning rate is 0 "
            f"in the last {num_steps - end}; raise it, or set {key}.min_lr_ratio"
        )


def _load_problems(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    progress: Progress,
) -> DataProto:
    problems, num_skipped = load_prompts(files, tokenizer, config.data, needs_ground_truth=needs_ground_truth(config))
    if num_skipped:
        progress.warn(
            f"skipped {num_skipped} problems of {', '.join(files)}: the prompt is longer than "
            f"data.max_prompt_length={config.data.max_prompt_length} tokens"
        )
    return problems
