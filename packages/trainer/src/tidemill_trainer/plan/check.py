"""The check of a run's memory before its models are loaded."""

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.plan.phases import plan_devices, role_sizes
from tidemill_trainer.plan.report import problems
from tidemill_trainer.progress import Progress

_TOLERANCE = 1.1  # of the estimate, see tests/plan/test_measured.py


def check_memory(config: Config, device_bytes: float, progress: Progress | None = None) -> None:
    """Check that each phase of a run fits into its devices.

    Args:
        config: configuration of the run, `placed`.
        device_bytes: memory of a device.
        progress: terminal output for a warning if it is uncertain; None: no warning.

    Raises:
        ConfigError: a phase requires over 10 % more memory. The message names it, what holds the memory, and the keys.
    """
    devices = plan_devices(config, role_sizes(config), device_bytes)
    if found := problems(devices, device_bytes, tolerance=_TOLERANCE):
        raise ConfigError("\n".join(found))
    if progress is not None:
        for problem in problems(devices, device_bytes):
            progress.warn(f"this may not fit: {problem}")
