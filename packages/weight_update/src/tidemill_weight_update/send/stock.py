"""The stock path: full tensors in buckets, for engines without the tidemill loader; and adapters."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from tidemill_weight_update.client import AdapterClient
from tidemill_weight_update.copy.table import aligned
from tidemill_weight_update.lora import LoraConfig, pairs_of, saved_name
from tidemill_weight_update.memory import (
    BucketHandle,
    CudaArena,
    HostArena,
    TensorEntry,
    new_stock_arena,
)
from tidemill_weight_update.send.fleet import CLIENT_ERRORS, Member
from tidemill_weight_update.send.ranks import Failure, Ranks
from tidemill_weight_update.stats import Stages
from tidemill_weight_update.tensors import (
    Item,
    ShardLike,
    box_of_dtensor,
    check_dense,
    checked_item,
    is_dtensor,
    sent_dtype,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that are sent together. `tensors[i]`, still on the trainer's side, fills `entries[i]`."""

    index: int
    entries: tuple[TensorEntry, ...]
    tensors: tuple[Tensor, ...]
    num_bytes: int
    is_last: bool

    def __str__(self) -> str:
        """Describe the bucket by its first and last tensor and their number."""
        return f"{self.index}: {_range(self.entries)}"

    def handle(self, arena: HostArena | CudaArena, version: str | None) -> BucketHandle:
        """Return what engines receive once `arena` is filled; the last bucket carries the version."""
        last = version if self.is_last else None
        return BucketHandle(index=self.index, entries=self.entries, memory=arena.publish(), weight_version=last)

    @property
    def payload_bytes(self) -> int:
        """Size of the tensors in bytes, without alignment gaps."""
        return sum(entry.num_bytes for entry in self.entries)

    def digest(self, *context: object) -> int:
        """Return a signed 64-bit hash that is equal on ranks with equal names, shapes, dtypes, order and `context`."""
        layout = [(entry.name, entry.shape, str(entry.dtype), entry.start) for entry in self.entries]
        text = repr((context, self.index, self.is_last, layout))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


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
    seen: set[str] = set()
    checked = (_full(*checked_item(item, seen)) for item in named_tensors)
    grouped = by_module if isinstance(named_tensors, Iterator) else whole_modules
    index = used = 0
    items: list[tuple[str, Tensor]] = []
    for module in grouped(checked):
        num_bytes = sum(aligned(_num_bytes(tensor, dtype)) for _, tensor in module)
        if items and used + num_bytes > bucket_bytes:
            yield _bucket(index, items, dtype, is_last=False)
            index, items, used = index + 1, [], 0
        items += module
        used += num_bytes
    if items:
        yield _bucket(index, items, dtype, is_last=True)
    if not seen:
        raise ValueError("expected named tensors, got an empty iterable")


def by_module(items: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Group neighbouring items whose names are equal except for the last two parts, reading one item ahead.

    These are the tensors of one module, such as `layers.0.self_attn.q_proj.weight` and
    `layers.0.self_attn.k_proj.bias`. Tensors that a loader combines belong to one module: projections that an engine
    fuses, a weight and its scale.
    """
    for _, group in groupby(items, _module):
        yield list(group)


def whole_modules(items: Iterable[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
    """Group items as `by_module` does, independent of their position, in the order in which modules first appear."""
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for item in items:
        groups.setdefault(_module(item), []).append(item)
    return list(groups.values())


def _module(item: tuple[str, Tensor]) -> str:
    return item[0].rsplit(".", 2)[0]


def _bucket(index: int, items: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None, *, is_last: bool) -> Bucket:
    entries: list[TensorEntry] = []
    end = 0
    for name, tensor in items:
        start = aligned(end)
        end = start + _num_bytes(tensor, dtype)
        to = sent_dtype(tensor, dtype)
        entries.append(TensorEntry(name=name, shape=tuple(tensor.shape), dtype=to, start=start, end=end))
    tensors = tuple(tensor for _, tensor in items)
    return Bucket(index=index, entries=tuple(entries), tensors=tensors, num_bytes=end, is_last=is_last)


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
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
        allow_non_finite: bool,
    ) -> None:
        self._ranks = ranks
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._device = device
        self._allow_non_finite = allow_non_finite
        self._arenas: dict[int, HostArena | CudaArena] = {}
        self._turn = 0

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
            bucket = self._agreed(failure, bucket, "bucket", version)
            gather(bucket, arena, failure, stages)
            if arena is not None:
                with failure, stages("load"):
                    if failure.error is None:
                        _load(bucket.handle(arena, version), members, alone=alone)
            num_buckets += 1
            num_tensors += len(bucket.entries)
            num_bytes += bucket.payload_bytes
            is_last = bucket.is_last
        with stages("finish"):
            for member in members:
                if flush and member.error is None and failure.error is None:
                    _flush(member, version)
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
    ) -> tuple[int, int]:
        """Make all members that have not failed serve the adapter as `name`, and unload `replaces`. Collective.

        Returns:
            Numbers of tensors and bytes.
        """
        failure = Failure()
        # SGLang may keep references to this memory, so it is not reused for other adapters.
        bucket, arena = None, None
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
                    _load_adapter(bucket.handle(arena, None), name, config, replaces, members)
        finally:
            if arena is not None:
                arena.close()
        return len(bucket.entries), bucket.payload_bytes

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}

    def _next(self, buckets: Iterator[Bucket], failure: Failure) -> tuple[Bucket | None, HostArena | CudaArena | None]:
        """Return the next bucket and, on rank 0, its memory. Nothing is gathered yet, so any rank may fail here."""
        if failure.error is not None:
            return None, None
        with failure:
            bucket = next(buckets)
            return bucket, self._arena_for(bucket) if self._ranks.rank == 0 else None
        return None, None

    def _arena_for(self, bucket: Bucket) -> HostArena | CudaArena:
        """Return memory with room for a bucket; it may have that of an earlier bucket."""
        if self._device is None:
            self._device = bucket.tensors[0].device
        # One arena on the host: an engine responds after it has copied. Two on a GPU, in turn, also from one update to
        # the next: the response to a bucket proves that the copies of the previous one are complete (see
        # `sglang.payload`).
        self._turn = 0 if self._device.type == "cpu" else 1 - self._turn
        place = self._turn
        arena = self._arenas.get(place)
        if arena is None or arena.data.numel() < bucket.num_bytes:
            if arena is not None:
                self._arenas.pop(place).close()  # free it before the next allocation
            arena = self._arenas[place] = new_stock_arena(self._device, max(bucket.num_bytes, 1))
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


def _load(handle: BucketHandle, members: Sequence[Member], *, alone: bool) -> None:
    for member in members:
        if member.error is not None:
            continue
        member.unchanged = False
        try:
            member.client.load_bucket(handle)
        except CLIENT_ERRORS as error:
            member.fail(f"did not load bucket {handle.index} ({_range(handle.entries)}): {error}", unchanged=False)
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
