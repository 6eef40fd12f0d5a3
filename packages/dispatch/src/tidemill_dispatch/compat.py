"""The names of verl's `single_controller.base.decorator`, for code that moves from verl.

New code uses the names of `tidemill_dispatch`; the table in the README maps one to the other.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from tidemill_dispatch.method import register as _register
from tidemill_dispatch.mode import Dispatch as _Dispatch
from tidemill_dispatch.mode import DispatchMode, GroupInfo, split_over, split_over_ranks
from tidemill_dispatch.sharding import RankCall

__all__ = ["Dispatch", "Execute", "make_nd_compute_dataproto_dispatch_fn", "register", "register_dispatch_mode"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Dispatch(_Dispatch):
    """verl's names of the modes.

    Attributes:
        DP_COMPUTE: `Dispatch.ALL_TO_ALL`.
        DP_COMPUTE_PROTO: `split_over_ranks()`.
    """

    DP_COMPUTE = _Dispatch.ALL_TO_ALL
    DP_COMPUTE_PROTO = split_over_ranks()


class Execute(StrEnum):
    """Ranks that run a method: all, or rank 0 only."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """Return `split_over(mesh_name)`."""
    return split_over(mesh_name)


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    *,
    timeout_s: float | None = None,
) -> Callable[[_F], _F]:
    """`tidemill_dispatch.register` with verl's `execute_mode`.

    Raises:
        ValueError: `Execute.RANK_ZERO` with a mode that sends data to other ranks.
        TypeError: as `tidemill_dispatch.register`.
    """
    if Execute(execute_mode) is Execute.RANK_ZERO:
        if dispatch_mode not in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
            name = dispatch_mode.name if isinstance(dispatch_mode, DispatchMode) else repr(dispatch_mode)
            raise ValueError(
                f"Execute.RANK_ZERO requires Dispatch.ONE_TO_ALL or Dispatch.RANK_ZERO, got {name}, whose data for "
                "other ranks would be lost; use @register(Dispatch.RANK_ZERO) of tidemill_dispatch"
            )
        dispatch_mode = Dispatch.RANK_ZERO
    return _register(dispatch_mode, blocking=blocking, timeout_s=timeout_s)


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[[Any, list[Any]], Any]
) -> DispatchMode:
    """Return a `DispatchMode` made of verl's pair of functions. Pass it to `register`.

    Args:
        dispatch_mode_name: name of the mode in error messages.
        dispatch_fn: `(group, *args, **kwargs)` -> `(args, kwargs)`, each argument a sequence with one item per rank.
        collect_fn: `(group, results)` -> return value of the call; `results` by rank.
    """

    def dispatch(group: GroupInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, RankCall]:
        by_position: Sequence[Sequence[Any]]
        by_key: dict[str, Sequence[Any]]
        by_position, by_key = dispatch_fn(group, *args, **kwargs)
        return {
            rank: (tuple(values[rank] for values in by_position), {key: values[rank] for key, values in by_key.items()})
            for rank in range(group.world_size)
        }

    return DispatchMode(name=dispatch_mode_name, dispatch_fn=dispatch, collect_fn=collect_fn)
