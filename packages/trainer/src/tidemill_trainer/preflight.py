"""What a configuration asks of the model and of this machine, checked before any process starts."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.config import MegatronConfig, check_settings

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.progress import Progress

# Workers for each CPU: what is above it is a slip of the pen, which the machine's memory would not survive.
_MOST_PER_CPU = 8


def check_model(config: Config) -> None:
    """Checks the model's folder, and that lengths and parallel sizes go with the model.

    Raises:
        ConfigError: they do not; it names the keys.
    """
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        hub = "; one of the Hugging Face hub is downloaded first: hf download ORG/NAME --local-dir FOLDER"
        raise ConfigError(
            f"config key model.path: there is no Hugging Face model in {path.absolute()} (no config.json)"
            f"{'' if path.exists() else hub}"
        )
    model = _read_config(path / "config.json")
    longest = config.data.max_prompt_length + config.rollout.response_length
    limit = model.get("max_position_embeddings")
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.max_prompt_length + rollout.response_length is {longest}; the model has {limit} positions"
        )
    heads, size = model.get("num_attention_heads"), config.rollout.tensor_parallel_size
    if heads is not None and heads % size:
        raise ConfigError(f"rollout.tensor_parallel_size={size} does not divide the model's {heads} attention heads")
    if isinstance(config.engine, MegatronConfig):
        try:
            check_settings(config.model, config.optimizer)
            config.engine.check(Architecture.read(path), config.actor.num_workers)
        except ValueError as error:
            raise ConfigError(f"config key engine: {error}") from error
    elif heads is not None and heads % (size := config.engine.ulysses_sequence_parallel_size):
        raise ConfigError(
            f"engine.ulysses_sequence_parallel_size={size} does not divide the model's {heads} attention heads"
        )
    if config.model.init_seed is None:
        try:
            with SafetensorsFiles(path):
                pass
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(f"config key model.path: {error}") from error


def check_machine(config: Config, progress: Progress) -> None:
    """Checks devices and CPUs, unless the run goes to another machine (`trainer.ray_address`).

    Raises:
        ConfigError: there is no GPU where one is asked for, or far more workers than CPUs; it names the keys.
    """
    if config.trainer.ray_address is not None:
        return
    has_gpu = torch.cuda.is_available()
    for key, device in (("engine.device", config.engine.device), ("rollout.device", config.rollout.device)):
        if device == "cuda" and not has_gpu:
            raise ConfigError(f'{key}="cuda", but torch sees no CUDA device here; use "auto" or "cpu"')
    if config.engine.device == "cuda" or (config.engine.device == "auto" and has_gpu):
        return
    workers, cpus = config.actor.num_workers, len(os.sched_getaffinity(0))
    text = f"actor.num_workers={workers} is more than the {cpus} CPUs that this process may use"
    if workers > _MOST_PER_CPU * cpus:
        raise ConfigError(f"{text}, by far; lower it")
    if workers > cpus:
        progress.warn(f"{text}: they will wait for each other")


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"config key model.path: {file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config key model.path: {file} has to be an object, not {str(config)[:60]}")
    return config
