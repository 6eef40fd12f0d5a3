"""What the caller of `update` passes, checked item by item."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tidemill_weight_update.tensors.plain_names import PlainNames
from tidemill_weight_update.tensors.shards import LocalShard, Piece, is_dtensor, piece_to_send

NamedTensors = Iterable[tuple[str, Tensor | LocalShard]]


def pieces_of(
    named_tensors: NamedTensors, dtype: torch.dtype | None, group_rank: int, plain: PlainNames
) -> Iterator[Piece]:
    """What this rank sends of each item, one item at a time. The names of plain tensors are added to `plain`.

    Raises:
        TypeError: an item is not a `(name, tensor)` pair, or the tensor has no dense storage.
        ValueError: a name comes twice, but for parts of a tensor (`LocalShard`), or there are no items at all.
    """
    seen: set[str] = set()
    for item in named_tensors:
        name, tensor = checked_item(item, seen)
        if isinstance(tensor, Tensor) and not is_dtensor(tensor) and tensor.numel():
            plain.names.add(name)
        piece = piece_to_send(name, tensor, dtype, group_rank)
        if piece is not None:
            yield piece
    if not seen:
        raise ValueError("expected named tensors, got an empty iterable: was the generator used before?")


def checked_item(item: object, seen: set[str]) -> tuple[str, Tensor | LocalShard]:
    """The item, as what it should be; its name is added to `seen`."""
    if not isinstance(item, tuple) or len(item) != 2:
        raise TypeError(f"expected (name, tensor) pairs, got {item!r:.80}; of a dict pass .items()")
    name, tensor = item
    if not isinstance(name, str) or not isinstance(tensor, Tensor | LocalShard):
        raise TypeError(f"expected (str, Tensor), got ({name!r:.80}, {type(tensor).__name__})")
    if name in seen and not isinstance(tensor, LocalShard):  # its parts are compared by the engines
        raise ValueError(f"tensor {name!r} came twice in one update; each name may be sent once")
    seen.add(name)
    return name, tensor
