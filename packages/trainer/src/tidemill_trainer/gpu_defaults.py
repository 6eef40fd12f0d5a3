"""Defaults that make a run on GPUs fast. Those of the configuration itself are for a CPU."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill_engines import FSDP2Config

if TYPE_CHECKING:
    from tidemill_trainer.config import Config

_SHARED = 0.5  # engine and training at the same time on one GPU
_ALONE = 0.8  # nothing else is on the GPU while the engine generates
_EPISODE_WORKERS = 4  # one process alone would start and score the episodes of a step one after the other

_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def gpu_defaults(data: dict[str, Any], *, has_gpu: bool) -> dict[str, Any]:
    """Return the values of keys that a configuration leaves open and whose default on GPUs differs from that on a CPU.

    | key | on GPUs |
    |---|---|
    | `engine.param_dtype` | "bfloat16" |
    | `model.compile_layers` | true for FSDP2 and a dense language model without adapters |
    | `rollout.deterministic` | false |
    | `rollout.mem_fraction_static` | 0.8, or 0.5 if an engine shares its GPU at the same time |
    | `episode.num_workers` | 4 |

    Those of micro-batches and offloading depend on the memory of the GPUs, see `plan/micro_batches.py`.

    Args:
        data: the configuration, as nested dicts.
        has_gpu: whether the device "auto" is a GPU.
    """
    engine, rollout = _section(data, "engine"), _section(data, "rollout")
    found: dict[str, dict[str, Any]] = {}
    if _is_on_gpu(engine, has_gpu):
        found["engine"] = {"param_dtype": "bfloat16"}
        if engine.get("backend", "fsdp2") == "fsdp2" and _is_dense(_section(data, "model")):
            found["model"] = {"compile_layers": True}
    if _is_on_gpu(rollout, has_gpu):
        part = rollout.get("num_gpus_per_engine", 1)
        shares = isinstance(part, int | float) and part < 1  # text is refused later
        found["rollout"] = {"deterministic": False, "mem_fraction_static": _SHARED if shares else _ALONE}
        found["episode"] = {"num_workers": _EPISODE_WORKERS}
    return {
        name: missing
        for name, values in found.items()
        if (missing := {key: value for key, value in values.items() if key not in _section(data, name)})
    }


def in_one_line(config: "Config") -> str:
    """Return what decides the speed of a run on GPUs, for its first line."""
    engine, rollout = config.engine, config.rollout
    in_turns = config.placement.engines == "turns"
    stays = ", whose state stays on the GPU" if in_turns and not config.placement.offload else ""
    parts = [f"engines {'in turns with' if in_turns else 'beside'} the training workers{stays}"]
    backend = f"{engine.backend} in {engine.param_dtype}" + (", compiled" if config.model.compile_layers else "")
    is_kept = isinstance(engine, FSDP2Config) and not engine.reshard_after_forward
    parts.append(backend + (", gathered weights kept" if is_kept else ""))
    parts.append(f"micro-batches of {engine.max_token_len_per_gpu} tokens")
    parts.append(f"KV pool and weights {rollout.mem_fraction_static:.0%} of a GPU")
    parts += ["FP8 rollouts"] * (rollout.quantization == "fp8")
    parts += ["deterministic inference"] * rollout.deterministic
    return "; ".join(parts)


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name, {})
    return section if isinstance(section, dict) else {}  # else the configuration is invalid, and its check says so


def _is_on_gpu(section: dict[str, Any], has_gpu: bool) -> bool:
    device = section.get("device", "auto")
    return device == "cuda" or (device == "auto" and has_gpu)


def _is_dense(model: dict[str, Any]) -> bool:
    """Return whether the model has neither experts, images nor adapters, whose compiled layers were not measured."""
    try:
        fields = json.loads(Path(str(model.get("path"))).expanduser().joinpath("config.json").read_bytes())
    except (OSError, ValueError):  # a later check names the file
        return False
    is_text = isinstance(fields, dict) and "vision_config" not in fields
    return is_text and "lora" not in model and not any(fields.get(name) for name in _OF_EXPERTS)
