"""Rows that go from the workers that made them to the workers of another call, past the driver."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidemill_dispatch.batch import is_batch, join_results, take_rows
from tidemill_dispatch.ray.failure import Failure
from tidemill_dispatch.ray.future import CallFuture
from tidemill_dispatch.rows import Cut, ShardPlan, plan_shard
from tidemill_dispatch.sharding import DeferredShard, PaddedShard


@dataclass(frozen=True, slots=True)
class Upstream:
    """The call that rows come from, as its consumers see it.

    Attributes:
        values: references to the parts of its result, in row order.
        parts: where the receipts of those parts are among `receipts`.
        receipts: where the receipts of all its ranks are among the receipts that came with the call.
    """

    group: str
    method: str
    values: tuple[ray.ObjectRef, ...]
    parts: tuple[int, ...]
    receipts: slice


@dataclass(frozen=True, slots=True)
class ChainedShard:
    """An argument whose rows the worker fetches itself.

    Attributes:
        shard: its index and the number of shards.
        is_whole: it is not a shard among those of the call, but a future that every rank gets whole.
        pieces: by part, the rows that this shard needs of it, cut on the node that holds the part; empty for a part
            that is on the worker's own node.
    """

    upstream: Upstream
    shard: tuple[int, int]
    num_real: int | None
    padded: bool
    is_whole: bool
    pieces: Mapping[int, ray.ObjectRef]

    def fetch(self, all_receipts: Sequence[Any]) -> PaddedShard:
        """Fetches the rows that this shard is made of and no others.

        Raises:
            RuntimeError: a rank of the upstream call raised.
            TypeError: a part is not a batch.
            ValueError: the shard has other rows than the other batches of the call.
        """
        receipts = all_receipts[self.upstream.receipts]
        where = f"{self.upstream.method!r} of group {self.upstream.group!r}"
        if any(isinstance(receipt, Failure) for receipt in receipts):
            raise RuntimeError(f"{where}, which makes the rows of this call, failed")
        lengths = [receipts[part] for part in self.upstream.parts]
        if None in lengths:
            raise TypeError(f"{where} did not return a batch on every dp rank, so its future cannot be an argument")
        index, n = self.shard
        plan = plan_shard(lengths, n, index, padded=self.padded)
        if self.num_real is not None and plan.num_real != self.num_real:
            raise ValueError(
                f"the batches of one call must have the same number of rows; {where} made {sum(lengths)} rows, "
                f"{plan.num_real} of them for shard {index} of {n}, where other batches have {self.num_real}"
            )
        return PaddedShard(self._rows(plan, lengths), plan.num_real, plan.num_rows)

    def _rows(self, plan: ShardPlan, lengths: Sequence[int]) -> Any:
        in_pieces = [cut.part in self.pieces and not _is_whole(cut, lengths) for cut in plan.cuts]
        refs = [
            self.pieces[cut.part] if in_piece else self.upstream.values[cut.part]
            for cut, in_piece in zip(plan.cuts, in_pieces, strict=True)
        ]
        rows = [
            value if in_piece else take_rows(value, cut.start, cut.stop)
            for value, cut, in_piece in zip(ray.get(refs), plan.cuts, in_pieces, strict=True)
        ]
        return rows[0] if len(rows) == 1 else join_results(rows)


def _is_whole(cut: Cut, lengths: Sequence[int]) -> bool:
    return (cut.start, cut.stop) == (0, lengths[cut.part])


@ray.remote(num_cpus=0)
def _cut_part(
    part: int, holder: list[ray.ObjectRef], shards: Sequence[int], n: int, padded: bool, *lengths: Any
) -> Any:
    """For each of `shards`, the rows that it needs of a part, if it needs some but not all of them."""
    pieces: list[Any] = [None] * len(shards)
    for i, index in enumerate(shards):
        if not all(isinstance(length, int) for length in lengths):
            break  # the consumers see the same receipts and say what is wrong
        needed = [cut for cut in plan_shard(lengths, n, index, padded=padded).cuts if cut.part == part]
        if needed and not _is_whole(needed[0], lengths):
            pieces[i] = take_rows(ray.get(holder[0]), needed[0].start, needed[0].stop)
    return pieces if len(pieces) > 1 else pieces[0]


class Links:
    """The upstream calls of one call, and the arguments that lead to them. Lives on the driver.

    Attributes:
        receipts: of all ranks of all upstream calls. Sent with every rank's call: Ray starts it when they are there.
        futures: the upstream calls.
    """

    def __init__(self) -> None:
        self.receipts: list[ray.ObjectRef] = []
        self.futures: list[CallFuture] = []
        self._upstreams: dict[int, Upstream] = {}
        self._pieces: dict[tuple[int, int, bool], dict[int, dict[int, ray.ObjectRef]]] = {}

    def shard(self, shard: DeferredShard, nodes: Mapping[int, set[str]], *, is_whole: bool = False) -> ChainedShard:
        """The argument for a shard of a future, or for all of it.

        Args:
            nodes: by shard, the nodes of the ranks that get it.
        """
        future = shard.source
        assert isinstance(future, CallFuture)
        upstream = self._upstream(future)
        key = (id(future), shard.n, shard.padded)
        if key not in self._pieces:
            self._pieces[key] = self._cut(future, shard, nodes)
        pieces = self._pieces[key].get(shard.index, {})
        return ChainedShard(upstream, (shard.index, shard.n), shard.num_real, shard.padded, is_whole, pieces)

    def _upstream(self, future: CallFuture) -> Upstream:
        if id(future) not in self._upstreams:
            call = future.call
            ranks = list(call.receipts)
            first = len(self.receipts)
            self.receipts += call.receipts.values()
            self.futures.append(future)
            self._upstreams[id(future)] = Upstream(
                group=call.group,
                method=call.method,
                values=tuple(call.values.values()),
                parts=tuple(ranks.index(rank) for rank in call.values),
                receipts=slice(first, len(self.receipts)),
            )
        return self._upstreams[id(future)]

    def _cut(
        self, future: CallFuture, shard: DeferredShard, nodes: Mapping[int, set[str]]
    ) -> dict[int, dict[int, ray.ObjectRef]]:
        """Has each part that is on another node than its consumers cut where it is, once for all of them."""
        call = future.call
        pieces: dict[int, dict[int, ray.ObjectRef]] = {index: {} for index in nodes}
        lengths = [call.receipts[rank] for rank in call.values]
        for part, (rank, value) in enumerate(call.values.items()):
            node = call.processes.node(rank)
            far = [index for index, consumers in nodes.items() if consumers != {node}]
            if not far:
                continue
            strategy = NodeAffinitySchedulingStrategy(node, soft=True)
            cut = _cut_part.options(num_returns=len(far), scheduling_strategy=strategy)
            refs: Any = cut.remote(part, [value], far, shard.n, shard.padded, *lengths)
            for index, ref in zip(far, [refs] if len(far) == 1 else refs, strict=True):
                pieces[index][part] = ref
        return pieces


def rows_of(result: Any) -> int | None:
    """What a receipt says of a result: its rows, None if it is not a batch."""
    return len(result) if is_batch(result) else None
