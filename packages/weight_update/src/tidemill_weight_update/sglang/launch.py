"""Launch arguments that an engine needs for the fast path, and how long its clients wait for the prefix cache."""

from collections.abc import Mapping, Sequence
from typing import Any

LOADER = "tidemill_weight_update.sglang.loader.load"

DRAIN_S = 10.0
"""For a paused engine: aborted requests need one more step."""

FLUSH_WAIT_FRACTION = 0.9
"""Fraction of the client's timeout, so that SGLang reports by itself that requests did not finish."""


def sglang_launch_args(custom_weight_loader: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return arguments for `sglang.Engine(...)` or `ServerArgs(...)`: `Engine(model_path=..., **sglang_launch_args())`.

    To launch a server from the command line: `python -m sglang.launch_server ... --custom-weight-loader
    tidemill_weight_update.sglang.loader.load`.

    Args:
        custom_weight_loader: further custom loaders.
    """
    return {"custom_weight_loader": [*custom_weight_loader, LOADER]}


def has_loader(arguments: Mapping[str, Any]) -> bool:
    """Return whether an engine with these SGLang arguments was launched with the tidemill loader.

    Raises:
        ValueError: the engine has replicas or pipeline stages, whose processes cannot be identified by tensor-parallel
            rank.
    """
    if arguments.get("dp_size", 1) > 1 and not arguments.get("enable_dp_attention", False):
        raise ValueError(
            f"engines with dp_size={arguments['dp_size']} are not supported; launch that many engines instead and pass "
            f"all of them"
        )
    if arguments.get("pp_size", 1) > 1:
        raise ValueError(f"engines with pp_size={arguments['pp_size']} are not supported; launch it with pp_size=1")
    return LOADER in (arguments.get("custom_weight_loader") or [])
