"""Dispatch modes: which arguments each rank receives, and what the caller gets from the ranks' results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tidemill_dispatch.batch import join_results
from tidemill_dispatch.mesh import MeshLayout
from tidemill_dispatch.sharding import Padding, RankCall, Replicate, split_call, without_wrapper


class GroupInfo(Protocol):
    """The part of a worker group that a dispatch mode may read."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str) -> MeshLayout: ...


DispatchFn = Callable[[GroupInfo, tuple[Any, ...], dict[str, Any]], Mapping[int, RankCall]]
CollectFn = Callable[[GroupInfo, list[Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchMode:
    """How the arguments of a call reach the ranks, and how their results are collected.

    Attributes:
        name: name of the mode in error messages.
        dispatch_fn: `(group, args, kwargs)` -> the call of each rank that runs, by rank. Ranks that are absent do not
            run.
        collect_fn: `(group, results)` -> return value of the call. `results` are those of the collect ranks, in order.
        collect_ranks_fn: `(group)` -> the ranks whose results are collected, in the order of `results`. None collects
            the results of all ranks that run, in rank order. A rank that is not collected sends no result.
        is_batch_parts: whether the results, in the order of the collect ranks, are parts of one batch. Required for a
            future of the call to be an argument of another call.
        padding: how workers pad their shards to equal length. None leaves shards unequal.
    """

    name: str
    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    collect_ranks_fn: Callable[[GroupInfo], Sequence[int]] | None = None
    is_batch_parts: bool = False
    padding: Padding | None = None


def _unwrapped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankCall:
    return tuple(without_wrapper(arg) for arg in args), {key: without_wrapper(value) for key, value in kwargs.items()}


def _one_to_all(group: GroupInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, RankCall]:
    return dict.fromkeys(range(group.world_size), _unwrapped(args, kwargs))


def _to_rank_zero(_group: GroupInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, RankCall]:
    return {0: _unwrapped(args, kwargs)}


def _all_to_all(group: GroupInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, RankCall]:
    world_size = group.world_size

    def items(name: int | str, value: Any) -> Sequence[Any]:
        if isinstance(value, Replicate):
            return [value.value] * world_size
        if isinstance(value, list | tuple) and len(value) == world_size:
            return value
        size = f" of length {len(value)}" if isinstance(value, list | tuple) else ""
        raise ValueError(
            f"argument {name!r} must be a list with one item for each of the {world_size} ranks, or Replicate(x); "
            f"got {type(value).__name__}{size}"
        )

    by_position = [items(index, value) for index, value in enumerate(args)]
    by_key = {key: items(key, value) for key, value in kwargs.items()}
    return {
        rank: (tuple(values[rank] for values in by_position), {key: values[rank] for key, values in by_key.items()})
        for rank in range(world_size)
    }


def _as_list(_group: GroupInfo, results: list[Any]) -> list[Any]:
    return results


def _only_result(_group: GroupInfo, results: list[Any]) -> Any:
    return results[0]


def _join(_group: GroupInfo, results: list[Any]) -> Any:
    return join_results(results)


def _splitting_mode(name: str, layout_of: Callable[[GroupInfo], MeshLayout], padding: Padding | None) -> DispatchMode:
    def dispatch(group: GroupInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, RankCall]:
        layout = layout_of(group)
        shards = split_call(args, kwargs, layout.dp_size, padding)
        return {rank: shards[dp_rank] for rank, dp_rank in enumerate(layout.dp_ranks)}

    return DispatchMode(
        name=name,
        dispatch_fn=dispatch,
        collect_fn=_join,
        collect_ranks_fn=lambda group: layout_of(group).collect_ranks,
        is_batch_parts=True,
        padding=padding,
    )


def split_over(mesh_name: str, *, padding: Padding | None = None) -> DispatchMode:
    """Return the mode that splits batches over a named mesh of the workers.

    Batches among the arguments, positional or keyword, are split by dp_rank. All ranks of a dp_rank receive the same
    shard. Every other argument goes to each rank unchanged. `Shard(x)` and `Replicate(x)` override this for one
    argument. One result per dp_rank is collected, in dp order: concatenated if the results are batches, else as a list.

    Args:
        mesh_name: name under which the workers registered the mesh.
        padding: how workers pad their shards to equal length. None leaves shards unequal where the rows do not divide.
    """
    return _splitting_mode(f"split_over({mesh_name!r})", lambda group: group.mesh(mesh_name), padding)


def split_over_ranks(*, padding: Padding | None = None) -> DispatchMode:
    """Return the mode that splits batches over all ranks: `split_over` a mesh in which each rank is a dp rank."""
    return _splitting_mode("split_over_ranks()", lambda group: MeshLayout.of_all_ranks(group.world_size), padding)


class Dispatch:
    """Modes that split no batch. See `split_over` and `split_over_ranks` for those that do.

    Attributes:
        ONE_TO_ALL: all ranks receive the same arguments. Results are a list in rank order.
        ALL_TO_ALL: each argument is a list with one item per rank, or `Replicate(x)`. Results are a list in rank order.
        RANK_ZERO: only rank 0 runs. Its result is returned.
    """

    ONE_TO_ALL = DispatchMode(name="ONE_TO_ALL", dispatch_fn=_one_to_all, collect_fn=_as_list)
    ALL_TO_ALL = DispatchMode(name="ALL_TO_ALL", dispatch_fn=_all_to_all, collect_fn=_as_list)
    RANK_ZERO = DispatchMode(name="RANK_ZERO", dispatch_fn=_to_rank_zero, collect_fn=_only_result, is_batch_parts=True)
