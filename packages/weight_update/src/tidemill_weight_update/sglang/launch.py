"""What an engine must be launched with for the fast path."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

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


def has_loader(arguments: Mapping[str, Any]) -> bool:
    """Whether an engine with these of SGLang's arguments was launched with our loader.

    Raises:
        ValueError: it has replicas or pipeline stages of its own, so that several of its processes would be taken for
            one tensor-parallel rank.
    """
    if arguments.get("dp_size", 1) > 1 and not arguments.get("enable_dp_attention", False):
        raise ValueError(
            f"the engine has dp_size={arguments['dp_size']}; launch as many engines and pass all of them instead"
        )
    if arguments.get("pp_size", 1) > 1:
        raise ValueError(f"the engine has pp_size={arguments['pp_size']}; engines are updated without pipeline stages")
    return LOADER in (arguments.get("custom_weight_loader") or [])
