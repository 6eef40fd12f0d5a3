"""The stock path: full tensors in buckets, for engines without the tidemill loader; and adapters."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from tidemill_weight_update.client import AdapterClient
from tidemill_weight_update.copy.table import aligned
from tidemill_weight_update.lora import LoraConfig, pairs_of, saved_name
from tidemill_weight_update.memory import BucketHandle, CudaArena, HostArena, TensorEntry, new_stock_arena
from tidemill_weight_update.send.fleet import Fleet, Member
from tidemill_weight_update.send.ranks import Failure, Ranks, text_digest
from tidemill_weight_update.stats import Stages
from tidemill_weight_update.tensors import (
    Item,
    ShardLike,
    box_of_dtensor,
    check_dense,
    checked_items,
    is_dtensor,
    sent_dtype,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that are sent together. `tensors[i]`, still on the trainer's side, fills `entries[i]`."""

    index: int
    entries: tuple[TensorEntry, ...]
    tensors: tuple[Tensor, ...]
    is_last: bool

    def __str__(self) -> str:
        """Describe the bucket by its first and last tensor and their number."""
        return f"{self.index}: {_range(self.entries)}"

    def handle(self, arena: HostArena | CudaArena) -> BucketHandle:
        return BucketHandle(index=self.index, entries=self.entries, memory=arena.publish())

    @property
    def num_bytes(self) -> int:
        return self.entries[-1].end

    @property
    def payload_bytes(self) -> int:
        """Size of the tensors in bytes, without alignment gaps."""
        return sum(entry.num_bytes for entry in self.entries)

    def digest(self, *context: object) -> int:
        """Return a signed 64-bit hash that is equal on ranks with equal names, shapes, dtypes, order and `context`."""
        layout = [(entry.name, entry.shape, str(entry.dtype), entry.start) for entry in self.entries]
        return text_digest(repr((context, self.index, self.is_last, layout)))


def _range(entries: Sequence[TensorEntry]) -> str:
    return f"{entries[0].name!r} .. {entries[-1].name!r}, {len(entries)} {'tensor' if len(entries) == 1 else 'tensors'}"


def plan_buckets(
    named_tensors: Iterable[Item], bucket_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[Bucket]:
    """Split `named_tensors` into buckets of at most `bucket_bytes`, in the order of their modules.

    The tensors of a module, which SGLang may combine, share a bucket; if they need more than `bucket_bytes`, the bucket
    is larger. An iterator is read one module ahead, and only neighbouring tensors count as one module. Shapes of
    DTensors are global; nothing is gathered and no data is read here.
    """
    checked: Iterable[tuple[str, Tensor]] = (_full(*item) for item in checked_items(named_tensors))
    if not isinstance(named_tensors, Iterator):  # modules in the order in which they first appear
        first: dict[str, int] = {}
        checked = sorted(checked, key=lambda item: first.setdefault(_module(item), len(first)))
    index = used = 0
    items: list[tuple[str, Tensor]] = []
    for module in (list(group) for _, group in groupby(checked, _module)):
        num_bytes = sum(aligned(_num_bytes(tensor, dtype)) for _, tensor in module)
        if items and used + num_bytes > bucket_bytes:
            yield _bucket(index, items, dtype, is_last=False)
            index, items, used = index + 1, [], 0
        items += module
        used += num_bytes
    if not items:
        raise ValueError("expected named tensors, got an empty iterable")
    yield _bucket(index, items, dtype, is_last=True)


def _module(item: tuple[str, Tensor]) -> str:
    """Return the name without its last two parts.

    It is equal for tensors that a loader combines: projections that an engine fuses (`self_attn.q_proj.weight` and
    `self_attn.k_proj.bias`), a weight and its scale.
    """
    return item[0].rsplit(".", 2)[0]


def _bucket(index: int, items: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None, *, is_last: bool) -> Bucket:
    entries: list[TensorEntry] = []
    end = 0
    for name, tensor in items:
        start = aligned(end)
        end = start + _num_bytes(tensor, dtype)
        to = sent_dtype(tensor, dtype)
        entries.append(TensorEntry(name=name, shape=tuple(tensor.shape), dtype=to, start=start, end=end))
    return Bucket(index=index, entries=tuple(entries), tensors=tuple(tensor for _, tensor in items), is_last=is_last)


def _num_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * sent_dtype(tensor, dtype).itemsize


def _full(name: str, tensor: Tensor | ShardLike) -> tuple[str, Tensor]:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name!r} is a LocalShard, which only engines launched with **sglang_launch_args() can receive; launch "
            f"the engine with them, or pass a full tensor or a DTensor"
        )
    check_dense(name, tensor)
    if is_dtensor(tensor):  # raises here, and not in a collective in which other ranks wait for this one
        box_of_dtensor(name, tensor)
    return name, tensor


def gather(bucket: Bucket, arena: HostArena | CudaArena | None, failure: Failure, stages: Stages) -> None:
    """Copy the full tensors of `bucket`, cast to the dtypes of its entries, to their places in `arena`.

    Collective over the ranks that hold the tensors. Every rank holds one full tensor at a time.

    Args:
        arena: memory of the bucket; None on ranks other than 0.
        failure: receives an error of a copy. The remaining tensors are still gathered, because other ranks wait.
    """
    for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
        with failure:
            with stages("gather"):
                full = _gathered(tensor)
            if arena is not None and failure.error is None:
                with stages("fill"):
                    entry.view(arena.data).copy_(full)


def _gathered(tensor: Tensor) -> Tensor:
    if not is_dtensor(tensor):
        return tensor
    # Parameters that FSDP2 offloaded to the CPU have a mesh of GPUs, whose collectives accept GPU memory only.
    tensor = tensor.to(tensor.device_mesh.device_type)
    assert is_dtensor(tensor)
    return tensor.full_tensor()


class StockPath:
    """Gathers tensors on rank 0, one bucket at a time, and passes them to SGLang: weights to its `flattened_bucket`
    loader, an adapter as a whole to its endpoint for adapters.

    Args:
        bucket_bytes: size of a bucket; the tensors of one module share a bucket, whatever their size.
        allow_non_finite: whether adapters may have infinite and NaN elements; weights are not checked.
        has_link: whether engines may be on other machines: adapters are sent as bytes.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
        allow_non_finite: bool,
        has_link: bool,
    ) -> None:
        self._ranks = ranks
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._device = device
        self._allow_non_finite = allow_non_finite
        self._has_link = has_link
        self._arenas: dict[int, HostArena | CudaArena] = {}
        self._place = 0

    def send(self, named_tensors: Iterable[Item], fleet: Fleet, stages: Stages) -> tuple[int, int, int]:
        """Send all tensors to the stock members of `fleet`, then flush their caches if it requires that. Collective.

        Returns:
            Numbers of buckets, tensors and bytes.
        """
        failure = Failure()
        buckets = plan_buckets(named_tensors, self._bucket_bytes, self._dtype)
        num_buckets = num_tensors = num_bytes = 0
        is_last = False
        while not is_last:
            bucket = arena = None
            if failure.error is None:
                with failure:
                    bucket = next(buckets)
                    arena = self._arena_for(bucket) if self._ranks.rank == 0 else None
            bucket = self._agreed(failure, bucket, "bucket")  # nothing is gathered before all ranks agree
            gather(bucket, arena, failure, stages)
            if arena is not None:
                with failure, stages("load"):
                    if failure.error is None:
                        _load(bucket.handle(arena), fleet)
            num_buckets += 1
            num_tensors += len(bucket.entries)
            num_bytes += bucket.payload_bytes
            is_last = bucket.is_last
        if fleet.flushes and failure.error is None:
            what = (
                "its outputs may use cache entries of the old weights (flush the cache before using it): it did not "
                "flush its prefix cache: "
            )
            with stages("finish"):
                for member in fleet.stock:
                    member.attempt(member.client.flush_cache, unchanged=False, what=what)
        self._ranks.exchange(failure.error, [])
        return num_buckets, num_tensors, num_bytes

    def send_adapter(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        name: str,
        config: LoraConfig,
        replaces: str | None,
        members: Sequence[Member],
        stages: Stages,
    ) -> tuple[int, int, int]:
        """Make all members that have not failed serve the adapter as `name`, and unload `replaces`. Collective.

        Returns:
            Numbers of buckets (1), tensors and bytes.
        """
        failure = Failure()
        bucket, arena = None, None  # SGLang may keep references to the memory, so it is not reused
        with failure, stages("prepare"):
            named = []
            for module, (a, b) in pairs_of(named_tensors, config).items():
                named += [(saved_name(module, "A"), a), (saved_name(module, "B"), b)]
            (bucket,) = plan_buckets(named, 1 << 62, self._dtype)  # a single one
            arena = HostArena(bucket.num_bytes) if self._ranks.rank == 0 else None
        try:
            bucket = self._agreed(failure, bucket, "adapter", name, config, replaces)
            gather(bucket, arena, failure, stages)
            if arena is not None and failure.error is None and not self._allow_non_finite:
                with failure, stages("fill"):
                    _check_finite(bucket, arena)
            self._ranks.exchange(failure.error, [])
            if arena is not None:
                with stages("load"):
                    handle = bucket.handle(arena)
                    if self._has_link:
                        handle = replace(handle, memory=arena.data.numpy().tobytes())
                    _load_adapter(handle, name, config, replaces, members)
        finally:
            if arena is not None:
                arena.close()
        return 1, len(bucket.entries), bucket.payload_bytes

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}

    def _arena_for(self, bucket: Bucket) -> HostArena | CudaArena:
        """Return memory with room for a bucket; it may have that of an earlier bucket."""
        if self._device is None:
            self._device = bucket.tensors[0].device
        # One arena on the host: an engine responds after it has copied. Two on a GPU, in turn, also from one update to
        # the next: the response to a bucket proves that the copies of the previous one are complete (see
        # `sglang.payload`).
        self._place = 0 if self._device.type == "cpu" else 1 - self._place
        arena = self._arenas.get(self._place)
        if arena is None or arena.data.numel() < bucket.num_bytes:
            if arena is not None:
                self._arenas.pop(self._place).close()  # free it before the next allocation
            arena = self._arenas[self._place] = new_stock_arena(self._device, max(bucket.num_bytes, 1))
        return arena

    def _agreed(self, failure: Failure, bucket: Bucket | None, *context: object) -> Bucket:
        """Return the bucket if all ranks have an equal one; raise on all of them otherwise."""
        digests = self._ranks.exchange(failure.error, [0 if bucket is None else bucket.digest(*context)])
        assert bucket is not None
        if any(row != digests[0] for row in digests):
            texts = self._ranks.gather_texts(f"{' '.join(map(str, context))} ({bucket})")
            shown = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise RuntimeError(f"the ranks disagree about this update; all must pass the same tensors. {shown}")
        return bucket


def _check_finite(bucket: Bucket, arena: HostArena) -> None:
    bad = [repr(entry.name) for entry in bucket.entries if not entry.view(arena.data).isfinite().all()]
    if bad:
        raise ValueError(
            f"these tensors have infinite or NaN elements: {', '.join(bad[:5])} ({len(bad)} in total); pass "
            f"allow_non_finite=True to send them"
        )


def _load(handle: BucketHandle, fleet: Fleet) -> None:
    """Load a bucket into all engines that have not failed; raise if none are left in the update."""
    for member in fleet.stock:
        if member.error is None:
            member.unchanged = False
            what = f"did not load bucket {handle.index} ({_range(handle.entries)}): "
            member.attempt(lambda client=member.client: client.load_bucket(handle), unchanged=False, what=what)
    if not fleet.num_receivers and all(member.error is not None for member in fleet.stock):
        raise RuntimeError("; ".join(f"{member.name}: {member.error}" for member in fleet.stock))


def _load_adapter(
    handle: BucketHandle, name: str, config: LoraConfig, replaces: str | None, members: Sequence[Member]
) -> None:
    """Load into all engines in parallel, so that an engine that waits for its requests does not delay the others."""

    def load(member: Member) -> None:
        # The engine's own weights do not change, and requests cannot select an adapter that is not loaded.
        member.attempt(lambda: _replace(member.client, handle, name, config, replaces), unchanged=True)

    with ThreadPoolExecutor(max_workers=max(1, len(members))) as pool:
        list(pool.map(load, members))


def _replace(client: object, handle: BucketHandle, name: str, config: LoraConfig, replaces: str | None) -> None:
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
