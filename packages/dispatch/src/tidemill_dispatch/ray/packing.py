"""Packs the arguments of a call on the driver, ready to be sent to each rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidemill_dispatch.ray.call import Call
from tidemill_dispatch.ray.chain import ChainedShard, Upstream, cut_part
from tidemill_dispatch.ray.future import CallFuture
from tidemill_dispatch.ray.pickling import pack
from tidemill_dispatch.sharding import DeferredRows, DeferredShard, RankCall


class Upstreams:
    """The calls whose futures are arguments of one call.

    Attributes:
        receipts: receipts of all ranks of all upstream calls. They are arguments of each rank's call too, so that Ray
            starts it when they exist.
        calls: the upstream calls.
    """

    def __init__(self) -> None:
        self.receipts: list[ray.ObjectRef] = []
        self.calls: list[Call] = []
        self._upstreams: dict[int, Upstream] = {}
        self._pieces: dict[tuple[int, int, bool], dict[int, dict[int, ray.ObjectRef]]] = {}

    def shard(self, shard: DeferredShard, nodes: Mapping[int, set[str]], *, is_whole: bool = False) -> ChainedShard:
        """Return the argument for a shard of a future, or for the whole of it.

        Args:
            nodes: nodes of the ranks that receive each shard, by shard.
        """
        future = shard.source
        assert isinstance(future, CallFuture)
        upstream = self._upstream(future.call)
        key = (id(future.call), shard.n, shard.padded)
        if key not in self._pieces:
            self._pieces[key] = _cut_remote_parts(future.call, shard, nodes)
        return ChainedShard(
            upstream=upstream,
            index=shard.index,
            n=shard.n,
            num_real=shard.num_real,
            padded=shard.padded,
            is_whole=is_whole,
            pieces=self._pieces[key].get(shard.index, {}),
        )

    def _upstream(self, call: Call) -> Upstream:
        if id(call) not in self._upstreams:
            ranks = list(call.receipts)
            first = len(self.receipts)
            self.receipts += call.receipts.values()
            self.calls.append(call)
            self._upstreams[id(call)] = Upstream(
                group=call.group,
                method=call.method,
                values=tuple(call.values.values()),
                parts=tuple(ranks.index(rank) for rank in call.values),
                receipts=slice(first, len(self.receipts)),
            )
        return self._upstreams[id(call)]


def _cut_remote_parts(
    call: Call, shard: DeferredShard, nodes: Mapping[int, set[str]]
) -> dict[int, dict[int, ray.ObjectRef]]:
    """Cut each part that ranks on another node receive, once, on its own node. Return the pieces by shard and part."""
    pieces: dict[int, dict[int, ray.ObjectRef]] = {index: {} for index in nodes}
    lengths = [call.receipts[rank] for rank in call.values]
    for part, (rank, value) in enumerate(call.values.items()):
        node = call.generation.node(rank)
        remote = [index for index, receiving in nodes.items() if receiving != {node}]
        if not remote:
            continue
        strategy = NodeAffinitySchedulingStrategy(node, soft=True)
        cut = cut_part.options(num_returns=len(remote), scheduling_strategy=strategy)
        refs: Any = cut.remote(part, [value], remote, shard.n, shard.padded, *lengths)
        for index, ref in zip(remote, [refs] if len(remote) == 1 else refs, strict=True):
            pieces[index][part] = ref
    return pieces


def pack_calls(
    call: str, calls: Mapping[int, RankCall], node_of: Callable[[int], str]
) -> tuple[dict[int, list[Any]], Upstreams]:
    """Pack the arguments of each rank as one list: positional arguments, then the values of keyword arguments.

    Each object is pickled and stored once, however many ranks receive it. All are packed before any rank is called: an
    argument that cannot be pickled leaves no rank waiting for the others. A future, or a shard of one, becomes a
    `ChainedShard`.

    Args:
        call: "class.method", for error messages.
        calls: arguments by rank.
        node_of: node of a rank.

    Raises:
        TypeError: an argument cannot be pickled (the message names it), or is a future whose results are not parts of
            one batch.
    """
    upstreams = Upstreams()
    values = {rank: [*args, *kwargs.values()] for rank, (args, kwargs) in calls.items()}
    nodes = _receiving_nodes(values, node_of)
    packed: dict[int, Any] = {}

    def pack_once(name: str, value: Any) -> Any:
        if id(value) in packed:
            return packed[id(value)]
        if isinstance(value, DeferredRows):
            (whole,) = value.chunk(1)
            result = upstreams.shard(whole, nodes[id(value), 1], is_whole=True)
        elif isinstance(value, DeferredShard):
            result = upstreams.shard(value, nodes[id(value.source), value.n])
        else:
            result = pack(f"{name} of {call}", value)
        packed[id(value)] = result
        return result

    flat = {
        rank: [pack_once(f"argument {i}", value) for i, value in enumerate(args)]
        + [pack_once(f"argument {key!r}", value) for key, value in kwargs.items()]
        for rank, (args, kwargs) in calls.items()
    }
    return flat, upstreams


def _receiving_nodes(
    values: Mapping[int, Sequence[Any]], node_of: Callable[[int], str]
) -> dict[tuple[int, int], dict[int, set[str]]]:
    """Return the nodes of the ranks that receive each shard: by (future, number of shards), then by shard."""
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
