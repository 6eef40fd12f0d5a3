"""The stock path: full tensors in buckets, for engines without the tidemill loader."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

from tidemill_weight_update.failure import Failure
from tidemill_weight_update.memory.arena import Arena, ArenaRing, new_stock_arena
from tidemill_weight_update.memory.handle import BucketHandle, CudaMemory, HostMemory
from tidemill_weight_update.send.bucket import Bucket, check_parts, gather, plan_buckets, tensor_range
from tidemill_weight_update.send.fleet import CLIENT_ERRORS, Member
from tidemill_weight_update.send.ranks import Ranks
from tidemill_weight_update.stats import Stages
from tidemill_weight_update.tensors.source import Item


class StockPath:
    """Gathers tensors on rank 0, one bucket at a time, and passes them to SGLang's `flattened_bucket` loader.

    Args:
        bucket_bytes: size of a bucket; the tensors of one module share a bucket, whatever their size.
        dtype: dtype in which floating-point tensors are sent; None: their own.
        device: device of the shared memory; None: that of the first tensor.
    """

    def __init__(
        self, ranks: Ranks, *, bucket_bytes: int, dtype: torch.dtype | None, device: torch.device | None
    ) -> None:
        self._ranks = ranks
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._device = device
        self._arenas: ArenaRing[HostMemory | CudaMemory] | None = None

    def send(
        self,
        named_tensors: Iterable[Item],
        version: str,
        members: Sequence[Member],
        flush: bool,
        stages: Stages,
        *,
        alone: bool,
    ) -> tuple[int, int, int]:
        """Send all tensors to all members that have not failed, then flush their caches if requested. Collective.

        Args:
            alone: whether the update has no other engines, so that it stops when all of these have failed.

        Returns:
            Numbers of buckets, tensors and bytes.
        """
        failure = Failure()
        buckets = plan_buckets(named_tensors, self._bucket_bytes, self._dtype)
        num_buckets = num_tensors = num_bytes = 0
        is_last = False
        while not is_last:
            bucket, arena = self._next(buckets, failure)
            self._agree(failure, bucket, version)
            assert bucket is not None
            with failure:
                gather(bucket, None if arena is None else arena.data, failure, stages)
            if arena is not None and failure.error is None:
                with failure, stages("load"):
                    self._load(bucket, arena, version, members, alone)
            num_buckets += 1
            num_tensors += len(bucket.entries)
            num_bytes += bucket.payload_bytes
            is_last = bucket.is_last
        with stages("finish"):
            for member in members:
                if flush and member.error is None and failure.error is None:
                    _flush(member, version)
        self._agree(failure, None, version)
        return num_buckets, num_tensors, num_bytes

    def close(self) -> None:
        if self._arenas is not None:
            self._arenas.close()
            self._arenas = None

    def _next(
        self, buckets: Iterator[Bucket], failure: Failure
    ) -> tuple[Bucket | None, Arena[HostMemory | CudaMemory] | None]:
        """Return the next bucket and, on rank 0, its memory. Nothing is gathered yet, so any rank may fail here."""
        if failure.error is not None:
            return None, None
        with failure:
            bucket = next(buckets)
            check_parts(bucket)
            if self._ranks.rank != 0:
                return bucket, None
            if self._arenas is None:
                device = bucket.tensors[0].device if self._device is None else self._device
                # One arena on the host: an engine responds after it has copied. Two on a GPU: the response to a bucket
                # proves that the copies of the previous one are complete (see `sglang.payload`).
                self._arenas = ArenaRing(1 if device.type == "cpu" else 2, partial(new_stock_arena, device))
            return bucket, self._arenas.next(bucket.num_bytes)
        return None, None

    def _agree(self, failure: Failure, bucket: Bucket | None, version: str) -> None:
        if bucket is None:
            self._ranks.agree(failure.error, 0, f"end of version {version!r}")
        else:
            text = f"bucket {bucket.index} of version {version!r} ({tensor_range(bucket.entries)})"
            self._ranks.agree(failure.error, bucket.digest(version), text)

    def _load(
        self,
        bucket: Bucket,
        arena: Arena[HostMemory | CudaMemory],
        version: str,
        members: Sequence[Member],
        alone: bool,
    ) -> None:
        memory = arena.publish()
        handle = BucketHandle(
            index=bucket.index,
            entries=bucket.entries,
            memory=memory,
            weight_version=version if bucket.is_last else None,
        )
        for member in members:
            if member.error is not None:
                continue
            member.unchanged = False
            try:
                member.client.load_bucket(handle)
            except CLIENT_ERRORS as error:
                member.fail(
                    f"did not load bucket {bucket.index} ({tensor_range(bucket.entries)}): {error}", unchanged=False
                )
        if alone and all(member.error is not None for member in members):
            raise RuntimeError("; ".join(f"{member.name}: {member.error}" for member in members))


def _flush(member: Member, version: str) -> None:
    try:
        member.client.flush_cache()
    except CLIENT_ERRORS as error:
        member.fail(
            f"has version {version!r} but did not flush its prefix cache: {error}. Its outputs may use cache entries "
            f"of the old weights; flush the cache before using it",
            unchanged=False,
        )
