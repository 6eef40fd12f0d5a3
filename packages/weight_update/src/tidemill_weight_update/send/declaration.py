"""Declared tensors of one trainer rank: what it sends of each, where each was in memory, and how to send them."""

import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tidemill_weight_update.client import EngineClient
from tidemill_weight_update.send.ranks import names_digest
from tidemill_weight_update.send.sender import split
from tidemill_weight_update.stats import UpdateStats
from tidemill_weight_update.tensors import (
    Item,
    Piece,
    ShardLike,
    Source,
    checked_items,
    is_dtensor,
    items_of,
    local_values,
    piece_to_send,
)


class Declaration:
    """Names, shapes, dtypes, layouts and addresses of tensors. It keeps no memory alive.

    Attributes:
        function: the function, if the tensors are made by one; the same function makes tensors of the same form.
        plain, plain_digest: names of the plain tensors, and their `names_digest`.
        pieces: what this rank sends of each tensor, None if nothing; `Piece.local` has no data.
        is_own: for each tensor, whether its piece is its own memory and not a temporary copy.
    """

    def __init__(self, source: Source, dtype: torch.dtype | None, group_rank: int) -> None:
        self.function = source if callable(source) else None
        self.plain: set[str] = set()
        self.pieces: list[Piece | None] = []
        self.is_own: list[bool] = []
        self._dtype = dtype
        self._group_rank = group_rank
        self._names: list[str] = []
        self._tensors: list[weakref.ref[Tensor] | None] = []
        self._forms: list[tuple[object, ...]] = []
        self._addresses: list[int] = []
        kinds = set()
        for name, tensor in checked_items(items_of(source)):
            if isinstance(tensor, Tensor) and not is_dtensor(tensor) and tensor.numel():
                self.plain.add(name)
            piece = piece_to_send(name, tensor, dtype, group_rank)
            address = local_values(tensor).data_ptr()
            self.pieces.append(None if piece is None else piece.without_data())
            self.is_own.append(piece is not None and piece.local.data_ptr() == address)
            self._names.append(name)
            self._tensors.append(weakref.ref(tensor) if isinstance(tensor, Tensor) else None)
            self._forms.append(_form(tensor))
            self._addresses.append(address)
            kinds.add(_kind(tensor))
        if not self._names:
            raise ValueError("expected named tensors, got an empty iterable")
        self.plain_digest = names_digest(self.plain)
        self._kind = kinds.pop() if len(kinds) == 1 else "mixed"

    def describes(self, source: Source) -> bool:
        """Return whether this is the declared function, or tensors of equal form at the same addresses."""
        if callable(source) or self.function is not None:
            return source == self.function
        items = source
        if len(items) != len(self._names) or set(map(type, items)) != {tuple} or {len(item) for item in items} != {2}:
            return False
        names, tensors = zip(*items, strict=True)
        if list(names) != self._names or not all(isinstance(tensor, Tensor | ShardLike) for tensor in tensors):
            return False
        # Comparing thousands of forms takes tens of milliseconds.
        same = all(ref is not None and tensor is ref() for tensor, ref in zip(tensors, self._tensors, strict=True))
        return (same or [_form(tensor) for tensor in tensors] == self._forms) and not self.moved(items)

    def moved(self, items: Sequence[Item]) -> list[str]:
        """Return the names of the declared tensors whose address has changed."""
        # Avoids a Python function call per tensor: there may be thousands.
        if self._kind == "plain":
            addresses = list(map(Tensor.data_ptr, map(operator.itemgetter(1), items)))  # type: ignore[arg-type]
        elif self._kind == "dtensor":  # equal to `to_local()` without gradient recording
            addresses = [tensor._local_tensor.data_ptr() for _, tensor in items]  # type: ignore[union-attr]
        else:
            addresses = [local_values(tensor).data_ptr() for _, tensor in items]
        if addresses == self._addresses:
            return []
        both = zip(self._names, addresses, self._addresses, strict=True)
        return [name for name, now, before in both if now != before]

    def parts(self, items: Iterable[Item], skipped: Container[int], max_bytes: int) -> Iterator[Piece]:
        """Yield parts of at most `max_bytes`; raise ValueError unless the tensors are the declared ones."""
        count = 0
        for name, tensor in checked_items(items):
            declared = self._names[count] if count < len(self._names) else None
            if name != declared:
                expected = "no more tensors" if declared is None else repr(declared)
                raise ValueError(
                    f"expected {expected} as tensor {count}, as declared, got {name!r}; the function must return the "
                    f"declared tensors in the same order, otherwise call declare() again"
                )
            if count not in skipped:
                piece, declared_piece = piece_to_send(name, tensor, self._dtype, self._group_rank), self.pieces[count]
                form = None if piece is None else piece.form()
                if form != (None if declared_piece is None else declared_piece.form()):
                    raise ValueError(
                        f"tensor {name!r} differs from its declaration: expected {_text(declared_piece)}, got "
                        f"{_text(piece)}; shape, dtype, device, strides and sharding must not change, otherwise call "
                        f"declare() again"
                    )
                if piece is not None:
                    yield from split(piece, max_bytes)
            count += 1
        if count < len(self._names):
            raise ValueError(
                f"expected {len(self._names)} tensors, as declared, got {count}: {self._names[count]!r} is missing"
            )


def _form(tensor: Tensor | ShardLike) -> tuple[object, ...]:
    """Return everything that describes a tensor except its address and values."""
    local = local_values(tensor)
    own = (local.shape, local.stride(), local.dtype, local.device)
    if not isinstance(tensor, Tensor):
        return *own, tensor.global_shape, tensor.start, tensor.replica, tensor.num_replicas
    if is_dtensor(tensor):
        return *own, tensor.shape, tensor.placements, tensor.device_mesh
    return own


def _kind(tensor: Tensor | ShardLike) -> str:
    """Return how the tensor's address is found: one that wraps another tensor has no address of its own."""
    if not isinstance(tensor, Tensor):
        return "mixed"
    if is_dtensor(tensor):
        return "mixed" if is_traceable_wrapper_subclass(tensor._local_tensor) else "dtensor"
    return "mixed" if is_traceable_wrapper_subclass(tensor) else "plain"


def _text(piece: Piece | None) -> str:
    if piece is None:
        return "no part on this rank"
    start, shape = piece.box.start, piece.box.shape
    return (
        f"part {shape} at {start} of {piece.spec.shape}, {piece.local.dtype} on {piece.device}, strides "
        f"{piece.local.stride()}"
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Transfer:
    """Tensors that `WeightUpdater.declare` described once, to be sent at every step.

    It keeps the tensors alive and is valid until their memory moves.

    Attributes:
        source: the tensors of this rank, or the function that makes them.
        number: number of the declaration, equal on all ranks; 0 for tensors that the update itself describes.
    """

    source: Source
    declaration: Declaration
    partial: bool
    number: int
    _send: "Callable[[Callable[[], Transfer], int | str, Sequence[EngineClient] | None], UpdateStats]"

    def send(self, weight_version: int | str) -> UpdateStats:
        """Load the tensors into the engines as `WeightUpdater.update` does, without describing them again. Collective.

        Raises the errors of `WeightUpdater.update`, and:
            ValueError: another rank sends another declaration, or the declared function returned other tensors
                (engines that loaded some of them are paused and excluded).
            RuntimeError: the memory of a declared tensor has moved; nothing was sent.
        """
        return self._send(lambda: self, weight_version, None)

    def readmit(self, engines: Sequence[EngineClient], weight_version: int | str) -> UpdateStats:
        """Load the tensors into engines that failed or join late; see `WeightUpdater.readmit`."""
        return self._send(lambda: self, weight_version, engines)

    def check_memory(self) -> None:
        """Raise RuntimeError if the memory of a declared tensor has moved."""
        moved = [] if callable(self.source) or self.number == 0 else self.declaration.moved(self.source)
        if moved:
            raise RuntimeError(
                f"the memory of {len(moved)} declared tensors has moved since declare(): "
                f"{', '.join(map(repr, moved[:5]))}; call declare() again after tensors are replaced, offloaded or "
                f"moved, or call update(), which does it for you"
            )
