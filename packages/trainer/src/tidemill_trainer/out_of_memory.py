"""Errors of devices whose memory is full: the phase, what holds the memory, and the keys to change."""

import re
from collections.abc import Iterator
from pathlib import Path

from tidemill_dispatch import WorkerDiedError, WorkerError

from tidemill_trainer.config import Config
from tidemill_trainer.logs import tail
from tidemill_trainer.plan.phases import Phase, plan_devices, role_sizes
from tidemill_trainer.plan.report import largest_parts
from tidemill_trainer.run_config import RunConfig
from tidemill_trainer.stalls.process import is_engine, log_name

_UPDATE: tuple[Phase, ...] = ("forward/backward", "optimizer")
_PHASES: dict[str, tuple[str, tuple[Phase, ...]]] = {
    "init_model": ("loading the model", ("log-probs",)),
    "init_roles": ("loading the other models", ("log-probs",)),
    "infer": ("the log-probs", ("log-probs",)),
    "log_probs": ("the log-probs", ("log-probs",)),
    "score": ("the scores of the reward model", ("log-probs",)),
    "update_actor": ("the update of the policy", _UPDATE),
    "update_on_policy": ("the update of the policy", _UPDATE),
    "update_sft": ("the update of the policy", _UPDATE),
    "update_weighted": ("the update of the policy", _UPDATE),
    "update_critic": ("the update of the critic", _UPDATE),
    "connect_engines": ("the weight update", ("weight update",)),
    "update_weights": ("the weight update", ("weight update",)),
    "save_checkpoint": ("the checkpoint", ("optimizer",)),
    "save_hf": ("the checkpoint", ("optimizer",)),
}
"""Methods of training workers: what they do, and its phases in `tidemill plan`."""

_IS_FULL = re.compile(r"OutOfMemoryError|out of memory|OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|ot enough memory")
_IS_AVOIDED = "to avoid out of memory"
"""Part of what SGLang logs when it takes smaller sizes."""
_OF_HOST = "node running low on memory"
"""Part of Ray's message when it kills a process because the memory of its host is full; it says what to do."""
_POOL_IS_SMALL = re.compile(r"(increase|raise) --mem-fraction-static", re.IGNORECASE)
_CAPACITY = re.compile(r"total capacity of ([\d.]+) GiB")
_LOG_LINES = 200
ENGINE_STARTS = "tidemill starts this engine"
"""Line of an engine's log before each of its starts."""


class DeviceMemoryError(RuntimeError):
    """The memory of a device is full; the message names the phase, what holds the memory, and the keys to change."""


def check_device_memory(error: BaseException | None, config: RunConfig, logs: Path) -> None:
    """Check whether an error of a worker means that the memory of its device is full.

    Args:
        error: error that stopped the run; None: there is none.
        config: configuration of the run, `placed`.
        logs: folder with the logs of the engines.

    Raises:
        DeviceMemoryError: it is full.
    """
    for failure in _worker_errors(error):
        if is_engine(failure.group):
            message = _of_engine(failure, config, logs)
        else:
            message = _of_training(failure, config) if isinstance(failure, WorkerError) else None
        if message is not None:
            raise DeviceMemoryError(message) from error


def _worker_errors(error: BaseException | None) -> Iterator[WorkerError | WorkerDiedError]:
    """Yield the errors of workers among an error and its causes."""
    while error is not None:
        if isinstance(error, WorkerError | WorkerDiedError):
            yield error
        error = error.__cause__


def _of_training(failure: WorkerError, config: RunConfig) -> str | None:
    """Return the message for a training worker; None: its error has another reason."""
    if not _IS_FULL.search(f"{failure.error_type}: {failure.error_message}") or _OF_HOST in failure.error_message:
        return None
    name, phases = _PHASES.get(failure.method, (f"{failure.method!r}", _UPDATE))
    if re.search(r"in onload\b", failure.remote_traceback):
        name += ", while offloaded tensors were copied back to the device"
    # torch lists here what this process and others, such as an engine, hold; its advice is about its allocator.
    found = failure.error_message.partition(" If reserved but unallocated")[0].rstrip(".")
    text = f"out of memory in {name}, on rank {failure.rank} of group {failure.group!r} ({failure.host}): {found}"
    if not isinstance(config, Config):
        keys = "lower engine.max_token_len_per_gpu, or set model.gradient_checkpointing=true; raise actor.num_workers"
        return f"{text}.\nTo need less, {keys}"
    capacity = _CAPACITY.search(found)
    devices = plan_devices(config, role_sizes(config), float(capacity[1]) * 2**30 if capacity else None)
    device = next((each for each in devices if each.name == failure.group), devices[0])
    fullest = max(phases, key=device.total)
    held, keys = largest_parts(device, fullest)
    return f"{text}.\nBy `tidemill plan`, most of the memory in {fullest} is {held}. To need less, {keys}"


def _of_engine(failure: WorkerError | WorkerDiedError, config: RunConfig, logs: Path) -> str | None:
    """Return the message for an engine, whose SGLang processes write to its log; None: its error has another reason."""
    assert isinstance(config, Config)
    log = logs / f"{log_name(failure.group, failure.rank)}.log"
    line = memory_error(log)
    if line is None:
        return None
    rollout = config.rollout
    held = f"Its weights and KV pool take {rollout.mem_fraction_static:.1%} of a GPU (rollout.mem_fraction_static)"
    if _POOL_IS_SMALL.search(line):
        keys = "raise it, or rollout.tensor_parallel_size"
    else:
        keys = (
            "lower it or rollout.max_total_tokens, raise rollout.tensor_parallel_size, or stop what else uses the GPU"
        )
        if config.placement.engines == "turns":
            keys += " (in turns, training workers may keep memory there, too)"
    return f"out of memory in the engine {failure.group} (SGLang): {line}\n{held}; {keys}. See {log}"


def memory_error(log: Path) -> str | None:
    """Return the last line since an engine's start in its log that says that memory is full; None if there is none."""
    text = tail(log, _LOG_LINES).rpartition(ENGINE_STARTS)[2]
    lines = [line.strip() for line in text.splitlines() if _IS_FULL.search(line) and _IS_AVOIDED not in line]
    return lines[-1] if lines else None
