"""The context in which the monkeypatches of this package are active."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import megatron.core
import torch

from tidemill_engines.megatron.patches.checkpoint_without_output import checkpoint_without_output
from tidemill_engines.megatron.patches.cpu import on_cpu
from tidemill_engines.megatron.patches.version import warn_unless_patched_version
from tidemill_engines.megatron.patches.weight_gradients import fused_weight_gradients
from tidemill_engines.megatron.patches.without_te import without_te


@contextmanager
def apply_patches(device: torch.device) -> Iterator[None]:
    """Patch megatron-core for this process while the context is open; contexts may overlap.

    Args:
        device: a CPU also gets the patches of `cpu`.
    """
    warn_unless_patched_version(megatron.core.__version__)
    with ExitStack() as stack:
        for patch in (without_te, checkpoint_without_output, fused_weight_gradients):
            stack.enter_context(patch())
        if device.type == "cpu":
            stack.enter_context(on_cpu())
        yield
