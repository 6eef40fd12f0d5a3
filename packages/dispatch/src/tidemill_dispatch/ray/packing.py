"""The arguments of one call, ready to be sent to each rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidemill_dispatch.ray.chain import Links
from tidemill_dispatch.ray.pickling import pack
from tidemill_dispatch.sharding import DeferredRows, DeferredShard, RankCall


def pack_calls(
    call: str, calls: Mapping[int, RankCall], node_of: Callable[[int], str]
) -> tuple[dict[int, list[Any]], Links]:
    """Packs each rank's arguments, positional then keyword values, flat.

    Every distinct object is pickled, and stored, once, however many ranks get it. All are packed before any rank is
    called: an argument that cannot be pickled leaves no rank waiting for the others. A future, or a shard of one,
    becomes the way to its rows.

    Raises:
        TypeError: an argument cannot be pickled (the text names it), or is the future of a call that does not chain.
    """
    links = Links()
    values = {rank: [*args, *kwargs.values()] for rank, (args, kwargs) in calls.items()}
    nodes = _consumers(values, node_of)
    packed: dict[int, Any] = {}

    def once(name: str, value: Any) -> Any:
        if id(value) in packed:
            return packed[id(value)]
        if isinstance(value, DeferredRows):
            (whole,) = value.chunk(1)
            result = links.shard(whole, nodes[id(value), 1], is_whole=True)
        elif isinstance(value, DeferredShard):
            result = links.shard(value, nodes[id(value.source), value.n])
        else:
            result = pack(f"{name} of {call}", value)
        packed[id(value)] = result
        return result

    flat = {
        rank: [once(f"argument {i}", value) for i, value in enumerate(args)]
        + [once(f"argument {key!r}", value) for key, value in kwargs.items()]
        for rank, (args, kwargs) in calls.items()
    }
    return flat, links


def _consumers(
    values: Mapping[int, Sequence[Any]], node_of: Callable[[int], str]
) -> dict[tuple[int, int], dict[int, set[str]]]:
    """By future and number of shards, then by shard: the nodes of the ranks that get it."""
    found: dict[tuple[int, int], dict[int, set[str]]] = {}
    for rank, rank_values in values.items():
        for value in rank_values:
            if isinstance(value, DeferredShard):
                key, index = (id(value.source), value.n), value.index
            elif isinstance(value, DeferredRows):
                key, index = (id(value), 1), 0
            else:
                continue
            found.setdefault(key, {}).setdefault(index, set()).add(node_of(rank))
    return found
