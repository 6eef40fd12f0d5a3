"""Recognition of the tensors of the previous update."""

import operator
from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tidemill_weight_update.tensors.shards import Piece, ShardLike, has_partial_sums, is_dtensor, local_values


class Fingerprint:
    """Names, addresses and layouts of an update's tensors, to recognize the same tensors in the next update. It keeps
    no memory alive except parameters.

    Thousands of parameters are compared in one or two milliseconds, fastest if the (name, parameter) tuples are the
    same objects. Other tensors, which may be new objects each time, take a few times longer.
    """

    def __init__(self, items: Sequence[tuple[str, Tensor | ShardLike]]) -> None:
        self._names = [name for name, _ in items]
        # Tuples are immutable, so an identical tuple needs no further comparison.
        self._pairs = list(items) if all(isinstance(tensor, nn.Parameter) for _, tensor in items) else []
        self._parameters = [tensor if isinstance(tensor, nn.Parameter) else None for _, tensor in items]
        self._addresses = [local_values(tensor).data_ptr() for _, tensor in items]
        self._forms = [_form(tensor) for _, tensor in items]
        # The reduction of partial sums is collective: ranks that send nothing of the tensor take part too.
        self._are_summed = any(is_dtensor(t) and has_partial_sums(t) for _, t in items if isinstance(t, Tensor))
        kinds = {_kind(tensor) for _, tensor in items if isinstance(tensor, Tensor)}
        self._kind = kinds.pop() if len(kinds) == 1 else "mixed"

    def covers(self, pieces: Sequence[Piece]) -> bool:
        """Return whether all pieces are views of the tensors themselves, and none is a temporary copy, here or on
        another rank.
        """
        return not self._are_summed and {piece.local.data_ptr() for piece in pieces} <= set(self._addresses)

    def matches(self, items: Sequence[object]) -> bool:
        """Return whether the items are the same memory under the same names in the same order."""
        if not items or len(items) != len(self._names):
            return False
        if self._pairs and all(map(operator.is_, items, self._pairs)):
            return self._addresses_of(self._parameters) == self._addresses
        if set(map(type, items)) != {tuple}:
            return False
        names = list(map(operator.itemgetter(0), items))  # type: ignore[arg-type]
        tensors = list(map(operator.itemgetter(1), items))  # type: ignore[arg-type]
        if names != self._names:
            return False
        if all(map(operator.is_, tensors, self._parameters)):
            return self._addresses_of(self._parameters) == self._addresses
        if not all(isinstance(tensor, Tensor | ShardLike) for tensor in tensors):
            return False
        return [local_values(t).data_ptr() for t in tensors] == self._addresses and [  # type: ignore[arg-type]
            _form(tensor)  # type: ignore[arg-type]
            for tensor in tensors
        ] == self._forms

    def _addresses_of(self, parameters: Sequence[nn.Parameter | None]) -> list[int]:
        # Avoids a Python function call per tensor: there may be thousands.
        if self._kind == "plain":
            return list(map(nn.Parameter.data_ptr, parameters))  # type: ignore[arg-type]
        if self._kind == "dtensor":  # equal to `to_local()` without gradient recording
            return [parameter._local_tensor.data_ptr() for parameter in parameters]  # type: ignore[union-attr]
        return [local_values(parameter).data_ptr() for parameter in parameters if parameter is not None]


def _kind(tensor: Tensor) -> str:
    """Return how the tensor's address is found: a parameter that wraps another tensor has no address of its own."""
    if is_dtensor(tensor):
        return "mixed" if is_traceable_wrapper_subclass(tensor._local_tensor) else "dtensor"
    return "mixed" if is_traceable_wrapper_subclass(tensor) else "plain"


def _form(tensor: Tensor | ShardLike) -> tuple[object, ...]:
    """Return everything that describes a tensor except its address and values."""
    local = local_values(tensor)
    own = (local.shape, local.stride(), local.dtype, local.device, local.is_neg(), local.is_conj())
    if not isinstance(tensor, Tensor):
        return *own, tensor.global_shape, tensor.start, tensor.replica, tensor.num_replicas
    if is_dtensor(tensor):
        return *own, tensor.shape, tensor.placements, tensor.device_mesh
    return own
