"""The version of megatron-core that the patches were written for."""

import warnings
from functools import cache

PATCHED_VERSION = "0.16.1"


@cache
def warn_unless_patched_version(installed: str) -> None:
    """Warn, once per version, when the installed megatron-core is not the one that the patches were written for."""
    if installed != PATCHED_VERSION:
        warnings.warn(
            f"tidemill_engines.megatron.patches was written for megatron-core {PATCHED_VERSION}, but megatron-core "
            f"{installed} is installed; patches may be wrong or have no effect. Install "
            f"megatron-core=={PATCHED_VERSION}, or run the engine's tests with {installed} and compare each module of "
            "tidemill_engines/megatron/patches with the new source.",
            stacklevel=2,
        )
