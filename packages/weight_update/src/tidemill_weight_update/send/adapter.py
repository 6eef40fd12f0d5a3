"""Adapters, sent through SGLang's own endpoint for them."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tidemill_weight_update.client import AdapterClient
from tidemill_weight_update.failure import Failure
from tidemill_weight_update.lora import LoraConfig, pairs_of, saved_name
from tidemill_weight_update.memory.arena import HostArena
from tidemill_weight_update.memory.handle import BucketHandle
from tidemill_weight_update.send.bucket import Bucket, check_parts, gather, plan_buckets, tensor_range
from tidemill_weight_update.send.fleet import Member
from tidemill_weight_update.send.ranks import Ranks
from tidemill_weight_update.stats import Stages

_ONE_BUCKET = 1 << 62


class AdapterPath:
    """Gathers an adapter on rank 0 and passes it to engines as a whole.

    Args:
        dtype: dtype in which it is sent; None: its own.
        allow_non_finite: whether infinite and NaN elements may be sent.
    """

    def __init__(self, ranks: Ranks, *, dtype: torch.dtype | None, allow_non_finite: bool) -> None:
        self._ranks = ranks
        self._dtype = dtype
        self._allow_non_finite = allow_non_finite

    def send(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        name: str,
        config: LoraConfig,
        replaces: str | None,
        members: Sequence[Member],
        stages: Stages,
    ) -> tuple[int, int]:
        """Make all members that have not failed serve the adapter as `name`. Collective.

        Returns:
            Numbers of tensors and bytes.
        """
        failure = Failure()
        bucket: Bucket | None = None
        # SGLang may keep references to this memory, so it is not reused for other adapters.
        arena: HostArena | None = None
        with failure, stages("prepare"):
            bucket = _bucket(named_tensors, config, self._dtype)
            check_parts(bucket)
            arena = HostArena(bucket.num_bytes) if self._ranks.rank == 0 else None
        digest = 0 if bucket is None else bucket.digest(name, config, replaces)
        description = "" if bucket is None else f"adapter {name!r} of {config} ({tensor_range(bucket.entries)})"
        try:
            self._ranks.agree(failure.error, digest, description)
            assert bucket is not None
            with failure:
                gather(bucket, None if arena is None else arena.data, failure, stages)
            if arena is not None and failure.error is None:
                with failure, stages("fill"):
                    self._check_finite(bucket, arena)
            self._ranks.exchange(failure.error, [])
            if arena is not None:
                handle = BucketHandle(index=0, entries=bucket.entries, memory=arena.publish(), weight_version=None)
                with stages("load"):
                    _load(handle, name, config, replaces, members)
        finally:
            if arena is not None:
                arena.close()
        return len(bucket.entries), bucket.payload_bytes

    def _check_finite(self, bucket: Bucket, arena: HostArena) -> None:
        if self._allow_non_finite:
            return
        bad = [repr(entry.name) for entry in bucket.entries if not entry.view(arena.data).isfinite().all()]
        if bad:
            raise ValueError(
                f"these tensors have infinite or NaN elements: {', '.join(bad[:5])} ({len(bad)} in total); pass "
                f"allow_non_finite=True to send them"
            )


def _bucket(named_tensors: Iterable[tuple[str, Tensor]], config: LoraConfig, dtype: torch.dtype | None) -> Bucket:
    pairs = pairs_of(named_tensors, config)

    def items() -> Iterator[tuple[str, Tensor]]:
        for module, (a, b) in pairs.items():
            yield saved_name(module, "A"), a
            yield saved_name(module, "B"), b

    (bucket,) = plan_buckets(items(), _ONE_BUCKET, dtype)
    return bucket


def _load(handle: BucketHandle, name: str, config: LoraConfig, replaces: str | None, members: Sequence[Member]) -> None:
    """Load into all engines in parallel, so that an engine that waits for its requests does not delay the others."""

    def load(member: Member) -> None:
        # The engine's own weights do not change, and requests cannot select an adapter that is not loaded.
        member.attempt(lambda: _replace(member, handle, name, config, replaces), unchanged=True)

    with ThreadPoolExecutor(max_workers=max(1, len(members))) as pool:
        list(pool.map(load, members))


def _replace(member: Member, handle: BucketHandle, name: str, config: LoraConfig, replaces: str | None) -> None:
    client = member.client
    if not isinstance(client, AdapterClient):
        raise TypeError(
            f"{type(client).__name__} cannot load adapters; implement the methods of the AdapterClient protocol"
        )
    served = client.adapters()
    if name in served:
        client.unload_adapter(name)
    client.load_adapter(name, config, handle)
    if replaces is not None and replaces != name and replaces in served:
        client.unload_adapter(replaces)
