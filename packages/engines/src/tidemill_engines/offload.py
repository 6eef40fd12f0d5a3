"""Offload tensors to the CPU and onload them again, without replacing the tensor objects."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.distributed.tensor import DTensor

_LARGEST = 256 << 20
_SMALLEST = 1 << 20
"""Sizes in bytes of the blocks of copies (see `_to_cpu`)."""


class OffloadableTensors:
    """A set of tensors that is either on its device or offloaded: copied to the CPU, with its device memory freed.

    The tensor objects stay the same, so the sharding and the optimizer can keep their references. While the tensors are
    offloaded, only `read` may access them.

    Args:
        tensors: returns the tensors; called at every offload. For DTensors, this rank's shard is offloaded.
        are_zero: returns whether all elements are zero at that time; then nothing is copied.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[torch.Tensor]], *, are_zero: Callable[[], bool] = lambda: False
    ) -> None:
        self._tensors = tensors
        self._are_zero = are_zero
        self._copies: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor] | None, int]] = {}
        self._is_offloaded = False
        self._num_users = 0
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None  # the copies of `prefetch` that nothing has waited for

    @property
    def is_offloaded(self) -> bool:
        return self._is_offloaded

    def num_bytes(self) -> int:
        """Return the size of the tensors on the device, offloaded or not."""
        return sum(local_part(tensor).nbytes for tensor in self._tensors())

    def offload(self) -> None:
        """Copy the tensors to the CPU and free their device memory; do nothing if they are offloaded."""
        if self._copied is not None:
            self.onload()
        if self._is_offloaded:
            return
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            storage = local_part(tensor).untyped_storage()
            if storage.size() > 0:
                storages[storage._cdata] = storage
        held = [None] * len(storages) if self._are_zero() else _to_cpu([_bytes(each) for each in storages.values()])
        copies = {key: (each, copy, each.size()) for (key, each), copy in zip(storages.items(), held, strict=True)}
        for storage, _, _ in copies.values():
            storage.resize_(0)
        self._copies, self._is_offloaded = copies, True

    def onload(self) -> None:
        """Copy the tensors back to the device: all of them or, if its memory does not suffice, none."""
        if self._copied is None:
            self._allocate()
            self._copy_back()
        self.discard()
        self._is_offloaded = False

    def prefetch(self) -> None:
        """Start to copy tensors of `offloaded_later` back to a GPU, beside its computation; `onload` waits for this."""
        is_on_gpu = any(storage.device.type == "cuda" for storage, _, _ in self._copies.values())
        if not (is_on_gpu and self._num_users and self._copied is None):
            return
        self._allocate()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # which may still use the memory, and copies to the CPU
        with torch.cuda.stream(self._stream):
            self._copy_back()
        self._copied = torch.cuda.Event()
        self._copied.record(self._stream)

    def _allocate(self) -> None:
        try:
            for storage, _, num_bytes in self._copies.values():
                storage.resize_(num_bytes)
        except BaseException:
            for storage, _, _ in self._copies.values():
                storage.resize_(0)
            raise

    def _copy_back(self) -> None:
        for storage, copy, _ in self._copies.values():
            _fill(_bytes(storage), copy)

    @contextmanager
    def onloaded(self, measure: Callable[[], AbstractContextManager[None]] = nullcontext) -> Iterator[None]:
        """Keep the tensors on the device within the context; the last of several overlapping contexts offloads them.

        Args:
            measure: returns a context for each copy of the tensors.
        """
        with self.offloaded_later(measure):
            with measure():
                self.onload()
            yield

    @contextmanager
    def offloaded_later(self, measure: Callable[[], AbstractContextManager[None]] = nullcontext) -> Iterator[None]:
        """Offload the tensors at the end of this context, where contexts of `onloaded` within it would do so."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                with measure():
                    self.offload()

    def discard(self) -> None:
        """Drop the CPU copies, of tensors that were copied back or are no longer referenced."""
        if self._copied is not None:
            self._copied.wait()
        self._copies, self._copied = {}, None

    def replace(self) -> None:
        """Drop the CPU copies after the tensors were created anew on the device; offload those if the old ones were."""
        was_offloaded, self._is_offloaded = self._is_offloaded, False
        self.discard()
        if was_offloaded:
            self.offload()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor` on its device, whether the tensors are offloaded or not."""
        local = local_part(tensor)
        held = self._copies.get(local.untyped_storage()._cdata)
        if held is None:
            return like(tensor, local.clone())
        _, copy, _ = held
        start, num_bytes = int(local.storage_offset()) * local.itemsize, _extent(local) * local.itemsize
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=local.device)
        _fill(flat, None if copy is None else _range(copy, start, num_bytes))
        return like(tensor, flat.view(local.dtype).as_strided(local.shape, local.stride()))


class Offloader:
    """The offloaded sets of tensors of an engine, by kind: "params", "grads", "optimizer". Offloads them at once.

    Args:
        tensors: the sets.
        measure: returns a context for each later copy of a set.
    """

    def __init__(
        self,
        tensors: Mapping[str, OffloadableTensors],
        *,
        measure: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._tensors = dict(tensors)
        self._measure = measure
        for each in self._tensors.values():
            each.offload()

    def get(self, kind: str) -> OffloadableTensors | None:
        """Return the tensors of a kind; None if the kind is never offloaded."""
        return self._tensors.get(kind)

    def onloaded(self, *kinds: str) -> AbstractContextManager[None]:
        """Keep the tensors of these kinds on the device within the context."""
        return self._within(OffloadableTensors.onloaded, kinds)

    def offloaded_later(self, *kinds: str) -> AbstractContextManager[None]:
        """Offload these kinds at the end of this context, where contexts of `onloaded` within it would do so."""
        return self._within(OffloadableTensors.offloaded_later, kinds)

    def prefetch(self, kind: str) -> None:
        """Start to copy the tensors of a kind back, if `offloaded_later` keeps them on the device."""
        if (tensors := self._tensors.get(kind)) is not None:
            with self._measure():
                tensors.prefetch()

    @contextmanager
    def _within(self, context: Callable[..., AbstractContextManager[None]], kinds: Sequence[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for kind in kinds:
                if (tensors := self._tensors.get(kind)) is not None:
                    stack.enter_context(context(tensors, self._measure))
            yield

    def check_onloaded(self, *kinds: str) -> None:
        """Raise RuntimeError if one of the kinds is offloaded."""
        offloaded = [kind for kind in kinds if kind in self._tensors and self._tensors[kind].is_offloaded]
        if offloaded:
            context = "train_mode() or eval_mode()" if offloaded == ["params"] else "train_mode()"
            raise RuntimeError(f"{', '.join(offloaded)}: offloaded to the CPU; call this within {context}")


def _to_cpu(sources: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Copy the bytes of each source to the CPU, from a GPU to pinned memory; return the parts of each copy.

    The copies follow one another in blocks. torch rounds pinned memory up to a power of two, so the sizes of blocks are
    powers of two, except for the last one below a MiB. Few blocks are few copies: a GPU queues only about 1,000.
    """
    pinned, left = any(source.is_cuda for source in sources), sum(map(len, sources))
    copies, block = [], torch.empty(0, dtype=torch.uint8)
    for source in sources:
        parts: list[torch.Tensor] = []
        while len(source) > 0:
            if not len(block):
                size = min(_LARGEST, 1 << (left.bit_length() - 1)) if left >= _SMALLEST else left
                block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                left -= size
            parts.append(block[: len(source)])
            parts[-1].copy_(source[: len(block)], non_blocking=True)
            source, block = source[len(parts[-1]) :], block[len(parts[-1]) :]
        copies.append(parts)
    return copies


def _fill(target: torch.Tensor, copy: list[torch.Tensor] | None) -> None:
    """Copy bytes back from the parts of `_to_cpu`; None stands for zeros."""
    if copy is None:
        target.zero_()
        return
    for data, part in zip(target.split([len(part) for part in copy]), copy, strict=True):
        data.copy_(part, non_blocking=True)


def _range(copy: list[torch.Tensor], start: int, num_bytes: int) -> list[torch.Tensor]:
    """Return views of the bytes from `start` on, in the parts of `_to_cpu`."""
    found = []
    for part in copy:
        if start < len(part) and num_bytes:
            found.append(part[start : start + num_bytes])
            num_bytes -= len(found[-1])
        start = max(0, start - len(part))
    return found


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or any other tensor itself, detached."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the placement of `tensor` and `local`, on any device, as this rank's shard."""
    # DTensor.from_local would move a copy on the CPU back to the device of the mesh.
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local
