"""Checks of a configuration against the model and this machine, before any process starts."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.progress import Progress
from tidemill_trainer.run_config import RunConfig

# More workers per CPU are almost certainly a typo and would exhaust memory.
_MAX_WORKERS_PER_CPU = 8


def check_model(config: Config, *, reads_weights: bool = True) -> None:
    """Check the folder of the model, and that lengths and parallel sizes match the model.

    Args:
        config: configuration of the run.
        reads_weights: also check that the folder has weights, if the run reads them.

    Raises:
        ConfigError: a check failed; the message names the keys.
    """
    longest = config.data.max_prompt_length + config.rollout.response_length
    model = check_policy(
        config, longest, "data.max_prompt_length + rollout.response_length", reads_weights=reads_weights
    )
    heads, size = model.get("num_attention_heads"), config.rollout.tensor_parallel_size
    if heads is not None and heads % size:
        raise ConfigError(f"rollout.tensor_parallel_size={size} must divide the {heads} attention heads of the model")


def check_policy(config: RunConfig, longest: int, keys: str, *, reads_weights: bool = True) -> dict[str, Any]:
    """Check the folder of the model, and that it supports rows of `longest` tokens and the training engine.

    Args:
        config: configuration of the run.
        longest: maximum length of a row in tokens.
        keys: keys that set it.
        reads_weights: also check that the folder has weights, if the run reads them.

    Returns:
        The content of the model's `config.json`.

    Raises:
        ConfigError: a check failed; the message names the keys.
    """
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        hub = "; download a model first, for example with: hf download ORG/NAME --local-dir FOLDER"
        raise ConfigError(
            f"config key model.path: expected a Hugging Face model in {path.absolute()}, found no config.json"
            f"{'' if path.exists() else hub}"
        )
    model = _read_config(path / "config.json")
    limit = model.get("max_position_embeddings")
    if limit is not None and longest > limit:
        raise ConfigError(f"{keys} must be <= {limit}, the number of positions of the model, got {longest}; lower it")
    try:
        config.engine.check(config.model, config.optimizer, config.actor.num_workers)
    except ValueError as error:
        raise ConfigError(f"config key engine: {error}") from error
    if reads_weights and config.model.init_seed is None:
        try:
            with SafetensorsFiles(path):
                pass
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(f"config key model.path: {error}") from error
    return model


def check_machine(config: RunConfig, progress: Progress) -> None:
    """Check devices and CPUs, unless the run uses a remote cluster (`trainer.ray_address`).

    Raises:
        ConfigError: a GPU is requested but there is none, or there are far more workers than CPUs; the message names
            the keys.
    """
    if config.trainer.ray_address is not None:
        return
    has_gpu = torch.cuda.is_available()
    devices = {"engine.device": config.engine.device}
    if isinstance(config, Config):
        devices["rollout.device"] = config.rollout.device
    for key, device in devices.items():
        if device == "cuda" and not has_gpu:
            raise ConfigError(f'{key}="cuda" requires a GPU, but torch finds no CUDA device; use "auto" or "cpu"')
    if config.engine.device == "cuda" or (config.engine.device == "auto" and has_gpu):
        return
    numbers, cpus = config.training_workers(), len(os.sched_getaffinity(0))
    workers, keys = sum(numbers.values()), " + ".join(numbers)
    limit = _MAX_WORKERS_PER_CPU * cpus
    if workers > limit:
        raise ConfigError(
            f"{keys} must be <= {limit}, {_MAX_WORKERS_PER_CPU} for each of the {cpus} CPUs that this "
            f"process may use, got {workers}; lower it"
        )
    if workers > cpus:
        progress.warn(
            f"{keys}={workers} is larger than the {cpus} CPUs that this process may use: the workers will "
            "slow each other down"
        )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"config key model.path: expected JSON in {file}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config key model.path: expected a JSON object in {file}, got {str(config)[:60]}")
    return config
