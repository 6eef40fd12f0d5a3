"""The command `tidemill plan`."""

import json
import math
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tidemill_trainer.bench.shapes import SHAPES, write_config
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, read_config
from tidemill_trainer.gpu_defaults import in_one_line
from tidemill_trainer.gpus import placed
from tidemill_trainer.plan.phases import plan_devices, role_sizes
from tidemill_trainer.plan.report import GIB, as_json, problems, table
from tidemill_trainer.plan.traffic import bytes_per_step, steps_of
from tidemill_trainer.preflight import check_model
from tidemill_trainer.progress import Progress

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


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
        read = partial(read_config, has_gpu=has_gpu, num_gpus=gpus, device_bytes=device_bytes)
        with TemporaryDirectory() as folder:
            name = read(Config, config_path, overrides).model.path
            if name in SHAPES:
                overrides = [*overrides, f"model.path={write_config(name, Path(folder))}"]
            config = placed(read(Config, config_path, overrides), gpus)
            check_model(config, reads_weights=False)
            sizes = role_sizes(config)
    except (ConfigError, ValueError, OSError) as error:
        progress.fail(str(error))
        return 1
    devices, steps = plan_devices(config, sizes, device_bytes), steps_of(config)
    moved, found = bytes_per_step(config, sizes["policy"]), problems(devices, device_bytes)
    if not as_text:
        sys.stdout.write(json.dumps(as_json(steps, devices, moved, found), indent=2) + "\n")
        return 1 if found else 0
    lines = [steps.sentence()]
    lines += [f"{role}: {each.total:,} parameters, {each.trainable:,} trainable" for role, each in sizes.items()]
    if device_bytes is not None and config.engine.device != "cpu":
        lines.append(in_one_line(config))
    lines += ["", *table(devices), "", "moved per step, for episodes of the maximum length"]
    lines += [f"  {name:45} {value / GIB:9.2f} GiB" for name, value in moved.items()]
    lines += ["", _verdict(device_bytes, found)]
    sys.stdout.write("\n".join(lines) + "\n")
    for problem in found:
        progress.fail(problem)
    return 1 if found else 0


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
