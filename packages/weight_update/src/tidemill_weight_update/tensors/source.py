"""The tensors that the caller passes to `update` and `declare`."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from tidemill_weight_update.tensors.shards import ShardLike

Item = tuple[str, Tensor | ShardLike]

NamedTensors = Iterable[Item] | Callable[[], Iterable[Item]]
"""Tensors that stay where they are; or a function that makes them one after the other, so that none is needed longer
than its bucket.
"""

Source = list[Item] | Callable[[], Iterable[Item]]
"""The same, after an iterator is read."""


def source_of(named_tensors: NamedTensors) -> Source:
    """Return the tensors as a list, or the function that makes them."""
    return named_tensors if callable(named_tensors) else list(named_tensors)


def items_of(source: Source) -> Iterable[Item]:
    """Return the tensors; those of a function are made while they are read."""
    return source() if callable(source) else source


def check_same_declaration(numbers: Sequence[int]) -> None:
    """Raise ValueError unless all ranks send the same declaration; 0 is that of `update`."""
    if len(set(numbers)) > 1:
        shown = ", ".join(
            f"rank {rank}: {f'declaration {number}' if number else 'update()'}" for rank, number in enumerate(numbers)
        )
        raise ValueError(
            f"the ranks send different declarations ({shown}); all ranks must call declare() and Transfer.send() "
            f"together and in the same order"
        )


def checked_item(item: object, seen: set[str]) -> Item:
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
