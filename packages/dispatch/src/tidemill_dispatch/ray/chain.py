"""Arguments whose rows a worker fetches from the workers that computed them, without the driver."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError

from tidemill_dispatch.batch import join_results, take_rows
from tidemill_dispatch.ray.failure import Failure
from tidemill_dispatch.rows import PartSlice, ShardPlan, plan_shard
from tidemill_dispatch.sharding import PaddedShard


@dataclass(frozen=True, slots=True)
class Upstream:
    """The call that computes the rows of an argument.

    Attributes:
        values: references to the parts of its result, in row order.
        parts: positions of the receipts of these parts among `receipts`.
        receipts: positions of the receipts of all its ranks among the receipts that were sent with the argument.
    """

    group: str
    method: str
    values: tuple[ray.ObjectRef, ...]
    parts: tuple[int, ...]
    receipts: slice


@dataclass(frozen=True, slots=True)
class ChainedShard:
    """A shard of the result of an upstream call.

    Attributes:
        index, n: which shard of how many.
        num_real: expected number of rows, known if the call has other batches.
        padded: whether the worker pads the shard to the length of the longest.
        is_whole: whether the argument is the whole result, sent to every rank, rather than a shard of the call.
        pieces: rows of the shard by part, cut on the node that holds the part. Has no entry for a part on the worker's
            own node.
    """

    upstream: Upstream
    index: int
    n: int
    num_real: int | None
    padded: bool
    is_whole: bool
    pieces: Mapping[int, ray.ObjectRef]

    def fetch(self, all_receipts: Sequence[Any]) -> PaddedShard:
        """Fetch the rows of this shard, and no others.

        Raises:
            RuntimeError: a rank of the upstream call raised, or its result cannot be pickled.
            TypeError: a part is not a batch.
            ValueError: the shard has another number of rows than the other batches of the call.
        """
        receipts = all_receipts[self.upstream.receipts]
        source = f"{self.upstream.method!r} of group {self.upstream.group!r}"
        if any(isinstance(receipt, Failure) for receipt in receipts):
            raise RuntimeError(f"{source}, whose result is an argument of this call, failed; see its error")
        lengths = [receipts[part] for part in self.upstream.parts]
        if None in lengths:
            raise TypeError(
                f"{source} did not return a batch on every dp rank, so its future cannot be an argument; call get() "
                "and pass the result"
            )
        plan = plan_shard(lengths, self.n, self.index, padded=self.padded)
        if self.num_real is not None and plan.num_real != self.num_real:
            raise ValueError(
                f"all batches of a call must have the same number of rows; {source} returned {sum(lengths)} rows, "
                f"{plan.num_real} of them in shard {self.index} of {self.n}, where other batches have {self.num_real}"
            )
        try:
            rows = self._rows(plan, lengths)
        except RayTaskError as error:  # Ray could not pickle the result of a rank
            raise RuntimeError(
                f"{source}, whose result is an argument of this call, failed to send it: {error.cause}"
            ) from None
        return PaddedShard(rows, plan.num_real, plan.num_rows)

    def _rows(self, plan: ShardPlan, lengths: Sequence[int]) -> Any:
        is_piece = [rows.part in self.pieces and not _is_whole_part(rows, lengths) for rows in plan.slices]
        refs = [
            self.pieces[rows.part] if piece else self.upstream.values[rows.part]
            for rows, piece in zip(plan.slices, is_piece, strict=True)
        ]
        fetched = [
            value if piece else take_rows(value, rows.start, rows.stop)
            for value, rows, piece in zip(ray.get(refs), plan.slices, is_piece, strict=True)
        ]
        return fetched[0] if len(fetched) == 1 else join_results(fetched)


def _is_whole_part(rows: PartSlice, lengths: Sequence[int]) -> bool:
    return (rows.start, rows.stop) == (0, lengths[rows.part])


@ray.remote(num_cpus=0)
def cut_part(part: int, holder: list[ray.ObjectRef], shards: Sequence[int], n: int, padded: bool, *lengths: Any) -> Any:
    """Return, for each of `shards`, its rows of a part; None for a shard that takes all of its rows or none."""
    pieces: list[Any] = [None] * len(shards)
    for i, index in enumerate(shards):
        if not all(isinstance(length, int) for length in lengths):
            break  # the workers receive the same receipts and raise
        needed = [rows for rows in plan_shard(lengths, n, index, padded=padded).slices if rows.part == part]
        if needed and not _is_whole_part(needed[0], lengths):
            pieces[i] = take_rows(ray.get(holder[0]), needed[0].start, needed[0].stop)
    return pieces if len(pieces) > 1 else pieces[0]
