"""Checks of a configuration against the model, before any process starts."""

import json
from pathlib import Path
from typing import Any

from tidemill_engines import MegatronConfig
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles
from tidemill_engines.megatron.architecture import Architecture
from tidemill_weight_update.fp8 import BLOCK

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.run_config import RunConfig


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
    if config.rollout.quantization == "fp8" and isinstance(config.engine, MegatronConfig):
        _check_blocks(config.engine, Architecture.read(Path(config.model.path)))


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


def _check_blocks(engine: MegatronConfig, architecture: Architecture) -> None:
    """Check that the parts of weights that Megatron exports consist of whole blocks of float8.

    Each key and value head of a layer is a part; MLPs are divided among tensor-parallel ranks.
    """
    a, tp, etp = architecture, engine.tensor_model_parallel_size, engine.expert_tp
    sizes = {}
    if a.latent is None:
        sizes["the size of attention heads"] = a.head_dim
    if tp > 1 and (a.num_dense_layers or not a.num_experts):
        sizes[f"intermediate_size / {tp} tensor-parallel ranks"] = a.intermediate_size // tp
    if etp > 1 and a.num_experts:
        sizes[f"moe_intermediate_size / {etp} ranks per expert"] = a.moe_intermediate_size // etp
    for name, size in sizes.items():
        if size % BLOCK:
            raise ConfigError(
                f'rollout.quantization="fp8" with engine.backend="megatron" requires that {name} is a multiple of '
                f'{BLOCK}, got {size}; set engine.backend="fsdp2" or remove rollout.quantization'
            )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"config key model.path: expected JSON in {file}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config key model.path: expected a JSON object in {file}, got {str(config)[:60]}")
    return config
