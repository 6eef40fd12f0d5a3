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
    kv_heads = model.get("num_key_value_heads")
    if kv_heads is not None and "kv_lora_rank" not in model and kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size} must divide the {kv_heads} key and value heads of the model, or be a "
            "multiple of them"
        )
    if config.rollout.quantization == "fp8":
        inner = next((key for key in ("moe_intermediate_size", "intermediate_size") if key in model), None)
        if inner is not None:
            ranks = size // (config.rollout.engine_args.get("ep_size", 1) if inner == "moe_intermediate_size" else 1)
            _require_blocks({f"{inner} / rollout.tensor_parallel_size": model[inner] // max(1, ranks)})
        if isinstance(config.engine, MegatronConfig):
            _require_blocks(_divided(config.engine, Architecture.read(Path(config.model.path))))


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
        hub = "download a model first, for example with: hf download ORG/NAME --local-dir FOLDER"
        hint = "give the folder with config.json, tokenizer and weights" if path.exists() else hub
        raise ConfigError(
            f"config key model.path: expected a Hugging Face model in {path.absolute()}, found no config.json; {hint}"
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


def _divided(engine: MegatronConfig, architecture: Architecture) -> dict[str, int]:
    """Return the sizes of the parts of weights that Megatron exports, by their description.

    Each key and value head of a layer is a part, without latent attention; other weights are divided among
    tensor-parallel ranks.
    """
    a, tp, etp = architecture, engine.tensor_model_parallel_size, engine.expert_tp
    sizes = {}
    if a.latent is None:
        sizes["the size of attention heads"] = a.head_dim
    elif tp > 1:
        heads = a.num_attention_heads // tp
        for name, size in (
            ("queries", a.head_dim),
            ("keys and values", a.latent.qk_nope_head_dim + a.latent.v_head_dim),
            ("values", a.latent.v_head_dim),
        ):
            sizes[f"the size of the {name} of {heads} heads"] = heads * size
    if tp > 1 and (a.num_dense_layers or not a.num_experts):
        sizes[f"intermediate_size / {tp} tensor-parallel ranks"] = a.intermediate_size // tp
    if tp > 1 and a.shared_intermediate_size:
        sizes[f"the intermediate size of shared experts / {tp} ranks"] = a.shared_intermediate_size // tp
    if etp > 1 and a.num_experts:
        sizes[f"moe_intermediate_size / {etp} ranks per expert"] = a.moe_intermediate_size // etp
    return sizes


def _require_blocks(sizes: dict[str, int]) -> None:
    """Check that parts of weights consist of whole blocks of float8."""
    for name, size in sizes.items():
        if size % BLOCK:
            raise ConfigError(
                f'rollout.quantization="fp8" requires that {name} is a multiple of {BLOCK}, got {size}; change '
                "parallel sizes or engine.backend, or remove rollout.quantization"
            )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"config key model.path: expected JSON in {file}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config key model.path: expected a JSON object in {file}, got {str(config)[:60]}")
    return config
