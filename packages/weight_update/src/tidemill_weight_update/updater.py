"""The updater: from an iterable of named tensors to engines that serve them."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidemill_weight_update.arena import Arena, ArenaRing
from tidemill_weight_update.bucket import Bucket, plan_buckets, tensor_range
from tidemill_weight_update.client import EngineClient
from tidemill_weight_update.gather import gather
from tidemill_weight_update.handle import BucketHandle
from tidemill_weight_update.ranks import Ranks
from tidemill_weight_update.stats import UpdateStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class WeightUpdater:
    """Sends weights to engines, a bucket at a time.

    All ranks of `process_group` (None: the default group, or this process alone) call `update` together; rank 0 of the
    group copies the tensors into memory that it shares with the engines, and only it talks to them.

    Args:
        engines: where the weights go; used on rank 0 only, other ranks may pass an empty sequence.
        bucket_bytes: size of a bucket. A larger tensor travels alone, and the shared memory grows to its size. At most
            this much memory is shared on the host, twice as much on a GPU.
        process_group: the ranks that update together. Its timeout bounds the wait for a rank that does not answer,
            which includes the wait of the others for the engines.
        dtype: floating-point tensors are sent as `tensor.to(dtype)`. None: as they are.
        device: where the shared memory lives, "cpu" or a CUDA device; None: where the first tensor is. Engines on GPUs
            read both kinds, engines on CPUs only host memory.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        *,
        bucket_bytes: int = 512 << 20,
        process_group: "ProcessGroup | None" = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
        self._engines = list(engines)
        self._bucket_bytes = bucket_bytes
        self._ranks = Ranks(process_group)
        self._dtype = dtype
        self._device = None if device is None else torch.device(device)
        self._arenas: ArenaRing | None = None
        self._closed = False

    def update(self, named_tensors: Iterable[tuple[str, Tensor]], weight_version: int | str) -> UpdateStats:
        """Loads `named_tensors` into every engine, makes `weight_version` visible, and flushes the prefix caches.

        Collective. Every rank iterates over the same names, shapes and dtypes in the same order; a DTensor is gathered
        by all ranks, of a plain tensor rank 0's value counts. `str(weight_version)` is stamped with the last bucket.
        The tensors must not change until this returns.

        Raises:
            ValueError: no tensors, a name twice, an empty version, or no engines.
            TypeError: an item that is not `(name, dense tensor)`.
            RuntimeError: an engine refused (named with its bucket), another rank failed, the ranks passed different
                tensors, or the updater is closed. What the iterable raises is raised as it is.
            An error on one rank is an error on all. After an error that names a bucket, engines may hold a mix of old
            and new tensors, those before the named one even under the new version if it was the last bucket; after one
            that names the prefix cache they hold the new tensors. A complete update puts all of that right.
        """
        started = time.perf_counter()
        version = str(weight_version)
        clock = _Clock()
        failure = _Failure()
        num_bytes = num_tensors = num_buckets = 0
        with failure:
            self._check_ready(version)
        buckets = plan_buckets(named_tensors, self._bucket_bytes, self._dtype)
        is_last = False
        with torch.no_grad():
            while not is_last:
                bucket, arena = self._next(buckets, failure)
                self._agree(failure, bucket, version)
                assert bucket is not None
                self._fill(bucket, arena, clock, failure)
                if arena is not None and failure.error is None:
                    with failure, clock("load"):
                        self._load(bucket, arena, version)
                num_bytes += bucket.payload_bytes
                num_tensors += len(bucket.entries)
                num_buckets += 1
                is_last = bucket.is_last
        if self._ranks.rank == 0 and failure.error is None:
            with failure, clock("flush"):
                self._finish(version)
        self._agree(failure, None, version)
        return UpdateStats(
            seconds=time.perf_counter() - started,
            num_bytes=num_bytes,
            num_tensors=num_tensors,
            num_buckets=num_buckets,
            weight_version=version,
            gather_s=clock.seconds["gather"],
            copy_s=clock.seconds["copy"],
            load_s=clock.seconds["load"],
            flush_s=clock.seconds["flush"],
        )

    def close(self) -> None:
        """Releases the shared memory. The engines are left as they are. May be called twice; not collective."""
        self._closed = True
        if self._arenas is not None:
            self._arenas.close()
            self._arenas = None

    def _check_ready(self, version: str) -> None:
        if self._closed:
            raise RuntimeError("this WeightUpdater is closed; make a new one")
        if not version:
            raise ValueError("weight_version must not be empty")
        if self._ranks.rank == 0 and not self._engines:
            raise ValueError("rank 0 talks to the engines, but was given none")

    def _next(self, buckets: Iterator[Bucket], failure: "_Failure") -> tuple[Bucket | None, Arena | None]:
        """The next bucket and, on rank 0, the memory for it. Nothing is gathered yet, so any rank may fail here."""
        if failure.error is not None:
            return None, None
        with failure:
            bucket = next(buckets)
            if self._ranks.rank != 0:
                return bucket, None
            if self._arenas is None:
                self._arenas = ArenaRing(bucket.tensors[0].device if self._device is None else self._device)
            return bucket, self._arenas.next(bucket.num_bytes)
        return None, None

    def _agree(self, failure: "_Failure", bucket: Bucket | None, version: str) -> None:
        if bucket is None:
            self._ranks.agree(failure.error, 0, f"end of version {version!r}")
        else:
            text = f"bucket {bucket.index} of version {version!r} ({tensor_range(bucket.entries)})"
            self._ranks.agree(failure.error, bucket.digest(version), text)

    def _fill(self, bucket: Bucket, arena: Arena | None, clock: "_Clock", failure: "_Failure") -> None:
        """Gathers the tensors of `bucket`, on all ranks; rank 0 copies them into their places."""
        with clock("gather"):
            pieces = gather(bucket, self._ranks.owner)
        if arena is not None:
            with failure, clock("copy"):
                for piece in pieces:
                    piece.copy_to(arena.data)

    def _load(self, bucket: Bucket, arena: Arena, version: str) -> None:
        handle = BucketHandle(
            index=bucket.index,
            entries=bucket.entries,
            memory=arena.publish(),
            weight_version=version if bucket.is_last else None,
        )
        for index, engine in enumerate(self._engines):
            try:
                engine.load_bucket(handle)
            except Exception as error:
                raise RuntimeError(
                    f"{self._name(index)} did not load bucket {bucket.index} ({tensor_range(bucket.entries)}): "
                    f"{error}. It may hold a mix of versions now; update again before using it"
                ) from error

    def _finish(self, version: str) -> None:
        for index, engine in enumerate(self._engines):
            try:
                engine.flush_cache()
            except Exception as error:
                raise RuntimeError(
                    f"{self._name(index)} has version {version!r} but did not flush its prefix cache: {error}. "
                    f"It may answer from the old weights' cache; flush it before using it"
                ) from error
            reported = engine.get_weight_version()
            if reported != version:
                raise RuntimeError(f"{self._name(index)} reports version {reported!r}, expected {version!r}")

    def _name(self, index: int) -> str:
        return f"engine {index} of {len(self._engines)} ({self._engines[index]!r})"


class _Failure:
    """Holds the first exception raised in its `with` blocks, so that it can be agreed on before it is raised."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if self.error is None:
            self.error = error
        return True


class _Clock:
    """Adds up wall time by stage."""

    def __init__(self) -> None:
        self.seconds = {"gather": 0.0, "copy": 0.0, "load": 0.0, "flush": 0.0}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started
