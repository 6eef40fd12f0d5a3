"""Checks of the items that the caller passes to `update`."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tidemill_weight_update.tensors.plain_names import PlainNames
from tidemill_weight_update.tensors.shards import Piece, ShardLike, is_dtensor, piece_to_send

NamedTensors = Iterable[tuple[str, Tensor | ShardLike]]


def pieces_of(
    named_tensors: NamedTensors, dtype: torch.dtype | None, group_rank: int, plain: PlainNames
) -> Iterator[Piece]:
    """Yield the piece that this rank sends of each item, and add the names of plain tensors to `plain`.

    Raises:
        TypeError: an item is not a `(name, tensor)` pair, or the tensor has no dense storage.
        ValueError: a duplicate name (except for parts of a tensor as `LocalShard`s), or no items at all.
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
        raise ValueError("expected named tensors, got an empty iterable; if it is a generator, create a new one")


def checked_item(item: object, seen: set[str]) -> tuple[str, Tensor | ShardLike]:
    """Return the item after checking its types and its name; add the name to `seen`."""
    if not isinstance(item, tuple) or len(item) != 2:
        raise TypeError(f"expected (name, tensor) pairs, got {item!r:.80}; for a dict pass .items()")
    name, tensor = item
    if not isinstance(name, str) or not isinstance(tensor, Tensor | ShardLike):
        raise TypeError(f"expected (str, Tensor or LocalShard), got ({name!r:.80}, {type(tensor).__name__})")
    if name in seen and isinstance(tensor, Tensor):  # engines check that shards do not overlap
        raise ValueError(f"tensor {name!r} was passed twice in one update; pass each name once")
    seen.add(name)
    return name, tensor


def check_same_kind(are_streams: Sequence[bool]) -> None:
    """Raise TypeError unless all ranks passed a collection or all passed a generator: one request covers all ranks."""
    if len(set(are_streams)) > 1:
        streams = ", ".join(str(rank) for rank, is_stream in enumerate(are_streams) if is_stream)
        raise TypeError(
            f"rank {streams} of {len(are_streams)} passed a generator and the others a collection; all ranks must pass "
            f"the same kind: list(...) turns a generator into a collection, iter(...) a collection into an iterator"
        )
