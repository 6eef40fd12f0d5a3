"""Tensors that give up their memory on the device while nobody needs them, and get it back with what was in it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch.distributed.tensor import DTensor


class Parked:
    """A changing set of tensors that is on its device, or away: copied to the CPU, its device memory freed.

    The tensors stay the same objects, so whoever refers to them (the sharding, the optimizer) need not know. While
    they are away nothing may read them but `read`.

    Args:
        tensors: what to send away, asked each time; of DTensors, this rank's part.
        are_zero: whether they are zero everywhere at the time, so that nothing has to be copied.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[torch.Tensor]], *, are_zero: Callable[[], bool] = lambda: False
    ) -> None:
        self._tensors = tensors
        self._are_zero = are_zero
        self._held: dict[int, tuple[torch.UntypedStorage, torch.Tensor | None, int]] = {}
        self._away = False
        self._num_users = 0

    @property
    def away(self) -> bool:
        """Whether the tensors are away."""
        return self._away

    def offload(self) -> None:
        """Sends the tensors away; does nothing if they are."""
        if self._away:
            return
        zero, held = self._are_zero(), {}
        for tensor in self._tensors():
            storage = local_part(tensor).untyped_storage()
            if storage._cdata not in held and storage.size() > 0:
                copy = None
                if not zero:
                    copy = torch.empty(storage.size(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                    copy.copy_(_bytes(storage))
                held[storage._cdata] = storage, copy, storage.size()
        for storage, _, _ in held.values():
            storage.resize_(0)
        self._held, self._away = held, True

    def load(self) -> None:
        """Brings the tensors back, all of them or, if the device has no room, none; does nothing if they are there."""
        try:
            for storage, copy, num_bytes in self._held.values():
                storage.resize_(num_bytes)
                if copy is None:
                    _bytes(storage).zero_()
                else:
                    _bytes(storage).copy_(copy)
        except BaseException:
            for storage, _, _ in self._held.values():
                storage.resize_(0)
            raise
        self._held, self._away = {}, False

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Brings the tensors back for as long as anyone is within, in whatever order they come and go."""
        self._num_users += 1
        try:
            self.load()
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self.offload()

    def forget(self) -> None:
        """Drops the contents of what is away, for tensors that nobody refers to any more."""
        self._held.clear()

    def replace(self) -> None:
        """Takes note that the tensors were made anew, on the device: sends those away if the former ones were."""
        was_away, self._away = self._away, False
        self._held.clear()
        if was_away:
            self.offload()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on its device, which stays valid when the tensors are sent away or are away now."""
        local = local_part(tensor)
        held = self._held.get(local.untyped_storage()._cdata)
        if held is None:
            return like(tensor, local.clone())
        _, copy, _ = held
        if copy is None:
            return like(tensor, torch.zeros_like(local, memory_format=torch.contiguous_format))
        flat = copy.to(local.device, copy=True).view(local.dtype)
        return like(tensor, flat.as_strided(local.shape, local.stride(), local.storage_offset()))


class Parking:
    """The sets of tensors that an engine sends away, by kind, such as "params", "grads" and "optimizer"."""

    def __init__(self, parked: Mapping[str, Parked]) -> None:
        self._parked = dict(parked)
        for each in self._parked.values():
            each.offload()

    def get(self, kind: str) -> Parked | None:
        """None for a kind that is never sent away."""
        return self._parked.get(kind)

    @contextmanager
    def at_hand(self, *kinds: str) -> Iterator[None]:
        """Brings what is away back from the CPU, and sends it away again when nobody else needs it."""
        with ExitStack() as stack:
            for kind in kinds:
                if (parked := self._parked.get(kind)) is not None:
                    stack.enter_context(parked.at_hand())
            yield

    def check(self, *kinds: str) -> None:
        """Raises RuntimeError if one of the kinds is away."""
        away = [kind for kind in kinds if kind in self._parked and self._parked[kind].away]
        if away:
            context = "train_mode() or eval_mode()" if away == ["params"] else "train_mode()"
            raise RuntimeError(f"{', '.join(away)}: offloaded to the CPU; call this within {context}")


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, detached; any other tensor as it is."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor laid out over the ranks as `tensor`, with `local` as this rank's part."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
