"""What an engine must be launched with for the fast path."""

import os
from collections.abc import Sequence

from tidemill_weight_update.control.request import TOKEN_VARIABLE, new_token

LOADER = "tidemill_weight_update.sglang.loader.load"


def sglang_launch_args(custom_weight_loader: Sequence[str] = ()) -> dict[str, list[str]]:
    """Arguments for `sglang.Engine(...)` or `ServerArgs(...)`: `Engine(model_path=..., **sglang_launch_args())`.

    The engine's processes inherit the run's token from the environment variable TIDEMILL_WEIGHT_TOKEN of this process;
    if it is not set, a new token is put there. A trainer in other processes needs the same variable.

    A server from the command line: `TIDEMILL_WEIGHT_TOKEN=... python -m sglang.launch_server ... --custom-weight-loader
    tidemill_weight_update.sglang.loader.load`.

    Args:
        custom_weight_loader: further loaders of yours.
    """
    os.environ.setdefault(TOKEN_VARIABLE, new_token())
    return {"custom_weight_loader": [*custom_weight_loader, LOADER]}
