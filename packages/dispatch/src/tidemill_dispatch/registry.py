"""`@register`, and the modes by which a call's arguments reach the ranks and their results come back."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from tidemill_dispatch.batch import join_results
from tidemill_dispatch.mesh import MeshLayout
from tidemill_dispatch.sharding import Padding, RankCall, Replicate, sent_whole, split_call

_F = TypeVar("_F", bound=Callable[..., Any])
_ATTRIBUTE = "__tidemill_method__"


class Dispatch(StrEnum):
    """The predefined modes.

    RANK_ZERO: rank 0 alone runs; its result comes back.
    ONE_TO_ALL: every rank gets the same arguments; results come back as a list in rank order.
    ALL_TO_ALL, DP_COMPUTE: every argument is a list with one item per rank; results as a list in rank order.
    DP_COMPUTE_PROTO: batches are split over all ranks, everything else goes to each; results that are batches are
        concatenated, others come back as a list in rank order.
    """

    RANK_ZERO = "RANK_ZERO"
    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"


class Execute(StrEnum):
    """Which ranks run a method: all of them, or rank 0 alone (then its result comes back, not a list)."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


class GroupInfo(Protocol):
    """What a dispatch mode may know about the group."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str) -> MeshLayout: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchMode:
    """How arguments reach the ranks and results come back.

    Attributes:
        dispatch_fn: (group, args, kwargs) -> one `RankCall` per rank, in rank order.
        collect_fn: (group, results of `result_ranks_fn(group)` in that order) -> what the caller gets.
        result_ranks_fn: the ranks that send their result; the others send a receipt.
        chains: the results, in the order of `result_ranks_fn`, are parts of one batch, so that a future of the call can
            be an argument of another call.
        padding: how the shards are padded to equal length; None splits unequally.
    """

    name: str
    dispatch_fn: Callable[[GroupInfo, tuple[Any, ...], dict[str, Any]], list[RankCall]]
    collect_fn: Callable[[GroupInfo, list[Any]], Any]
    result_ranks_fn: Callable[[GroupInfo], Sequence[int]]
    chains: bool = False
    padding: Padding | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpec:
    """What `@register` says about a method."""

    name: str
    mode: DispatchMode
    execute_mode: Execute
    blocking: bool
    timeout_s: float | None


def _all_ranks(group: GroupInfo) -> Sequence[int]:
    return range(group.world_size)


def _one_to_all(group: GroupInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RankCall]:
    call = tuple(sent_whole(arg) for arg in args), {key: sent_whole(value) for key, value in kwargs.items()}
    return [call] * group.world_size


def _all_to_all(group: GroupInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RankCall]:
    world_size = group.world_size

    def items(name: int | str, value: Any) -> Sequence[Any]:
        if isinstance(value, Replicate):
            return [value.value] * world_size
        if isinstance(value, list | tuple) and len(value) == world_size:
            return value
        size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
        raise ValueError(
            f"argument {name!r} must be a list with one item for each of {world_size} ranks, or Replicate(x); "
            f"got {type(value).__name__}{size}"
        )

    by_position = [items(index, value) for index, value in enumerate(args)]
    by_key = {key: items(key, value) for key, value in kwargs.items()}
    return [
        (tuple(values[rank] for values in by_position), {key: values[rank] for key, values in by_key.items()})
        for rank in range(world_size)
    ]


def _as_list(_group: GroupInfo, results: list[Any]) -> list[Any]:
    return results


def _join(_group: GroupInfo, results: list[Any]) -> Any:
    return join_results(results)


def _splitting_mode(name: str, layout_of: Callable[[GroupInfo], MeshLayout], padding: Padding | None) -> DispatchMode:
    def dispatch(group: GroupInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RankCall]:
        layout = layout_of(group)
        shards = split_call(args, kwargs, layout.dp_size, padding)
        return [shards[dp_rank] for dp_rank in layout.dp_ranks]

    return DispatchMode(
        name=name,
        dispatch_fn=dispatch,
        collect_fn=_join,
        result_ranks_fn=lambda group: layout_of(group).collect_ranks,
        chains=True,
        padding=padding,
    )


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str, *, padding: Padding | None = None) -> DispatchMode:
    """The mode of a call over a named mesh that the workers registered.

    Batches among the arguments, positional or keyword, are split by dp_rank, and every rank of a dp_rank gets the same
    shard; everything else goes to each rank as it is. `Shard(x)` and `Replicate(x)` override that. Rows that do not
    divide are split unequally, or padded by the workers, as `padding` says. One result per dp_rank comes back, in dp
    order: concatenated if the results are batches, else as a list.
    """
    return _splitting_mode(f"nd_compute({mesh_name})", lambda group: group.mesh(mesh_name), padding)


def make_dp_compute_dataproto_dispatch_fn(*, padding: Padding | None = None) -> DispatchMode:
    """`Dispatch.DP_COMPUTE_PROTO`, with padding: like a mesh in which every rank has a shard of its own."""
    return _splitting_mode(
        Dispatch.DP_COMPUTE_PROTO.value, lambda group: MeshLayout.of_all_ranks(group.world_size), padding
    )


_MODES: dict[str, DispatchMode] = {}


def register_dispatch_mode(
    name: str,
    dispatch_fn: Callable[[GroupInfo, tuple[Any, ...], dict[str, Any]], list[RankCall]],
    collect_fn: Callable[[GroupInfo, list[Any]], Any],
    result_ranks_fn: Callable[[GroupInfo], Sequence[int]] = _all_ranks,
) -> DispatchMode:
    """Makes a pair of functions known as a mode, for `@register(dispatch_mode=name)`; see `DispatchMode`.

    Raises:
        ValueError: the name is taken.
    """
    mode = DispatchMode(name=name, dispatch_fn=dispatch_fn, collect_fn=collect_fn, result_ranks_fn=result_ranks_fn)
    return _add_mode(mode)


def _add_mode(mode: DispatchMode) -> DispatchMode:
    if mode.name in _MODES:
        raise ValueError(f"dispatch mode {mode.name!r} is registered already; take another name than {sorted(_MODES)}")
    _MODES[mode.name] = mode
    return mode


_add_mode(
    DispatchMode(
        name=Dispatch.RANK_ZERO.value,
        dispatch_fn=_one_to_all,
        collect_fn=lambda _group, results: results[0],
        result_ranks_fn=lambda _group: (0,),
        chains=True,
    )
)
register_dispatch_mode(Dispatch.ONE_TO_ALL.value, _one_to_all, _as_list)
register_dispatch_mode(Dispatch.ALL_TO_ALL.value, _all_to_all, _as_list)
register_dispatch_mode(Dispatch.DP_COMPUTE.value, _all_to_all, _as_list)
_add_mode(make_dp_compute_dataproto_dispatch_fn())


def get_dispatch_mode(mode: DispatchMode | str) -> DispatchMode:
    """Looks a mode up by name (a `Dispatch` is one); a `DispatchMode` is returned as it is.

    Raises:
        ValueError: no mode of that name; the text lists the known ones.
        TypeError: neither a mode nor a name, for example a method, because `@register` stands without parentheses.
    """
    if isinstance(mode, DispatchMode):
        return mode
    if not isinstance(mode, str):
        raise TypeError(f"expected a dispatch mode or its name, got {mode!r}; write @register(...) above a method")
    if mode not in _MODES:
        raise ValueError(f"unknown dispatch mode {mode!r}; known modes: {sorted(_MODES)}")
    return _MODES[mode]


def register(
    dispatch_mode: DispatchMode | str = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    *,
    timeout_s: float | None = None,
) -> Callable[[_F], _F]:
    """Makes a worker's method callable on the group.

    Args:
        dispatch_mode: a `Dispatch`, the name of a registered mode, or a `DispatchMode`.
        execute_mode: which ranks run; `Execute.RANK_ZERO` goes with ONE_TO_ALL and RANK_ZERO.
        blocking: whether the group's method waits and returns the result, or returns a future.
        timeout_s: deadline of each call in seconds; None takes the group's.

    The function itself is returned unchanged. A subclass that overrides the method keeps its registration. An async
    method runs to its end on an event loop of its process before the next call is begun.

    Raises:
        ValueError: an unknown mode, or `Execute.RANK_ZERO` with a mode that spreads data over ranks.
        TypeError: a generator function, or `@register` without parentheses.
    """
    mode = get_dispatch_mode(dispatch_mode)
    execute_mode = Execute(execute_mode)
    if execute_mode is Execute.RANK_ZERO:
        if mode.name not in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL):
            raise ValueError(
                f"Execute.RANK_ZERO would lose the data that mode {mode.name!r} sends to other ranks; "
                "use it with Dispatch.ONE_TO_ALL or Dispatch.RANK_ZERO"
            )
        mode = _MODES[Dispatch.RANK_ZERO]
    elif mode.name == Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO

    def decorate(fn: _F) -> _F:
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(f"{fn.__qualname__} is a generator function; register a method that returns its result")
        spec = MethodSpec(
            name=fn.__name__,
            mode=mode,
            execute_mode=execute_mode,
            blocking=blocking,
            timeout_s=timeout_s,
        )
        setattr(fn, _ATTRIBUTE, spec)
        return fn

    return decorate


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """The registered methods of a class and its bases by name; the most derived registration of a name counts."""
    found: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            spec = getattr(value, "__dict__", {}).get(_ATTRIBUTE)
            if isinstance(spec, MethodSpec):
                found[name] = spec
    return found
