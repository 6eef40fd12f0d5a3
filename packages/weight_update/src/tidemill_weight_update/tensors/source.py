"""The tensors that the caller passes to `update` and `declare`."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

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


class PlainNames:
    """The names of the plain tensors that a rank passed in an update. Read `digest` after all names are added."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @cached_property
    def digest(self) -> int:
        """Signed 64-bit hash of the names; 0 if there are none."""
        if not self.names:
            return 0
        text = json.dumps(sorted(self.names)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
