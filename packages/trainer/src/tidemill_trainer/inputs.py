"""What a configuration refers to: tokenizer, problems and reward function."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill_dataproto import DataProto
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.data import DataError, load_prompts
from tidemill_trainer.progress import Progress
from tidemill_trainer.rewards import RewardFn, exact_match, load_reward


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a configuration refers to, loaded and checked before any process starts."""

    tokenizer: PreTrainedTokenizerBase
    train: DataProto
    val: DataProto | None
    reward_fn: RewardFn


def load_inputs(config: Config, progress: Progress) -> Inputs:
    """Loads tokenizer, problems and reward function.

    Raises:
        ConfigError, DataError, RewardError: something the user can mend.
    """
    reward_fn = load_reward(config.reward.function)
    tokenizer = _load_tokenizer(config)

    def load(files: Sequence[str]) -> DataProto:
        return _load_problems(files, tokenizer, config, progress, needs_ground_truth=reward_fn is exact_match)

    train_data = load(config.data.train_files)
    val_data = load(config.data.val_files) if config.data.val_files else None
    if config.warmup.max_steps > 0 and any(text is None for text in train_data.non_tensor_batch["response"]):
        raise DataError("the warm-up needs a `response` in every row; set warmup.max_steps=0 to train without it")
    return Inputs(tokenizer=tokenizer, train=train_data, val=val_data, reward_fn=reward_fn)


def _load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"config key model.path: there is no Hugging Face model in {path} (no config.json)")
    longest = config.data.max_prompt_length + config.rollout.response_length
    limit = _model_config(path).get("max_position_embeddings")
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.max_prompt_length + rollout.response_length is {longest}; the model has {limit} positions"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:  # tokenizers raises no narrower one for a damaged file
        raise ConfigError(f"config key model.path: no tokenizer could be loaded from {path}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"config key model.path: the tokenizer in {path} has no end token (eos_token)")
    return tokenizer


def _model_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_bytes())
    except ValueError as error:
        raise ConfigError(f"config key model.path: {path / 'config.json'} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config key model.path: {path / 'config.json'} has to be an object, not {str(config)[:60]}")
    return config


def _load_problems(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    progress: Progress,
    *,
    needs_ground_truth: bool,
) -> DataProto:
    problems, num_skipped = load_prompts(files, tokenizer, config.data, needs_ground_truth=needs_ground_truth)
    if num_skipped:
        progress.warn(f"left out {num_skipped} problems of {', '.join(files)} with too long a prompt")
    return problems
