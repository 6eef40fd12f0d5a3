"""The command `tidemill plan`."""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tidemill_trainer.bench.shapes import SHAPES, write_config
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, read_either_config
from tidemill_trainer.gpu_defaults import in_one_line
from tidemill_trainer.gpus import placed
from tidemill_trainer.plan.model import ModelSizes, count_model
from tidemill_trainer.plan.phases import Device, plan_devices, plan_fine_tuning, role_sizes
from tidemill_trainer.plan.report import GIB, as_json, problems, table
from tidemill_trainer.plan.traffic import bytes_per_step, fine_tuning_bytes, num_rows, steps_of
from tidemill_trainer.preflight import check_model, check_policy
from tidemill_trainer.progress import Progress
from tidemill_trainer.sft.config import SFTConfig

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run requires.

    Attributes:
        step: sizes of a step in words.
        sizes: sizes of the model of each role.
        devices: memory of each kind of device.
        moved: bytes that a step moves, by kind of transfer.
        speed: what decides the speed on GPUs in one line; None: it is not shown.
    """

    step: str
    sizes: dict[str, ModelSizes]
    devices: list[Device]
    moved: dict[str, float]
    speed: str | None = None


def plan(
    config_path: Path, overrides: Sequence[str], *, device_memory: str | None, num_gpus: int | None, as_text: bool
) -> int:
    """Run `tidemill plan CONFIG.toml`; return 1 if something does not fit or the configuration is invalid.

    `model.path` may also be the name of a model of `tidemill bench`.
    """
    progress = Progress()
    try:
        has_gpu = True if num_gpus or device_memory is not None else None
        gpus, device_bytes = _num_gpus(num_gpus), _device_bytes(device_memory)
        read = partial(read_either_config, has_gpu=has_gpu, num_gpus=gpus, device_bytes=device_bytes)
        with TemporaryDirectory() as folder:
            name = read(config_path, overrides).model.path
            if name in SHAPES:
                overrides = [*overrides, f"model.path={write_config(name, Path(folder))}"]
            config = read(config_path, overrides)
            is_sft = isinstance(config, SFTConfig)
            made = _fine_tuning(config) if is_sft else _training(placed(config, gpus), device_bytes)
    except (ConfigError, ValueError, OSError) as error:
        progress.fail(str(error))
        return 1
    found = problems(made.devices, device_bytes)
    if not as_text:
        sys.stdout.write(json.dumps(as_json(made.step, made.devices, made.moved, found), indent=2) + "\n")
        return 1 if found else 0
    lines = [made.step]
    lines += [f"{role}: {each.total:,} parameters, {each.trainable:,} trainable" for role, each in made.sizes.items()]
    lines += [] if made.speed is None else [made.speed]
    lines += ["", *table(made.devices), "", "moved per step, at the maximum length"]
    lines += [f"  {name:45} {value / GIB:9.2f} GiB" for name, value in made.moved.items()]
    lines += ["", _verdict(device_bytes, found)]
    sys.stdout.write("\n".join(lines) + "\n")
    for problem in found:
        progress.fail(problem)
    return 1 if found else 0


def _training(config: Config, device_bytes: float | None) -> Plan:
    """Return the plan of a run of reinforcement learning, whose configuration is `placed`."""
    check_model(config, reads_weights=False)
    sizes = role_sizes(config)
    return Plan(
        step=steps_of(config).sentence(),
        sizes=sizes,
        devices=plan_devices(config, sizes, device_bytes),
        moved=bytes_per_step(config, sizes["policy"]),
        speed=in_one_line(config) if device_bytes is not None and config.engine.device != "cpu" else None,
    )


def _fine_tuning(config: SFTConfig) -> Plan:
    """Return the plan of a run of `tidemill sft`."""
    check_policy(config, config.data.max_length, "data.max_length", reads_weights=False)
    sizes = count_model(config.model)
    examples = "examples" if config.dpo is None else f"pairs = {num_rows(config)} sequences"
    return Plan(
        step=f"{config.data.train_batch_size} {examples} of at most {config.data.max_length} tokens, 1 optimizer step",
        sizes={"policy": sizes},
        devices=plan_fine_tuning(config, sizes),
        moved=fine_tuning_bytes(config, sizes),
    )


def _verdict(device_bytes: float | None, found: list[str]) -> str:
    if device_bytes is None:
        return "no device memory was compared: this machine has no GPU; set --device-memory, such as 139GiB"
    if found:
        return "it does not fit"
    return f"it fits into {device_bytes / GIB:.1f} GiB per device; leave 1 to 2 GiB for CUDA and fragmentation"


def _num_gpus(number: int | None) -> float:
    """Return the number of GPUs; that of this machine without an option, and as many as required if it has none."""
    return float(torch.cuda.device_count() or math.inf) if number is None else number


def _device_bytes(text: str | None) -> float | None:
    """Return the memory of a device in bytes; that of this machine's GPU without an option; None if there is none."""
    if text is None:
        return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB|GB|MB)", text)
    if match is None:
        raise ConfigError(f"--device-memory must be a number with GiB, MiB, GB or MB, such as 139GiB; got {text!r}")
    return float(match[1]) * _UNITS[match[2]]
