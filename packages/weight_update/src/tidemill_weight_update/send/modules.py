"""Grouping of tensors: by the module they belong to, and into buckets. Pure arithmetic."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tidemill_weight_update.copy.table import aligned

T = TypeVar("T")


def by_module(items: Iterable[T], name: Callable[[T], str]) -> Iterator[list[T]]:
    """Group neighbouring items whose names are equal except for the last two parts, reading one item ahead.

    These are the tensors of one module, such as `layers.0.self_attn.q_proj.weight` and
    `layers.0.self_attn.k_proj.bias`. Tensors that a loader combines belong to one module: projections that an engine
    fuses, a weight and its scale.
    """
    group: list[T] = []
    for item in items:
        if group and _module(name(item)) != _module(name(group[0])):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def whole_modules(items: Iterable[T], name: Callable[[T], str]) -> list[list[T]]:
    """Group items as `by_module` does, independent of their position, in the order in which modules first appear."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(_module(name(item)), []).append(item)
    return list(groups.values())


def in_buckets(
    modules: Iterable[Sequence[T]], num_bytes: Callable[[T], int], bucket_bytes: int, *, splits_modules: bool
) -> Iterator[tuple[list[T], bool]]:
    """Group the items of modules into buckets of at most `bucket_bytes`, in their order, reading one module ahead.

    Items start at aligned offsets. A module that does not fit into the rest of a bucket starts a new one. If it needs
    more than `bucket_bytes`, its items fill several buckets if `splits_modules`; otherwise its bucket is larger.

    Yields:
        The items of a bucket, and whether it is the last one.
    """
    bucket: list[T] = []
    used = 0
    for module in modules:
        sizes = [num_bytes(item) for item in module]
        if bucket and used + sum(map(aligned, sizes[:-1])) + sizes[-1] > bucket_bytes:
            yield bucket, False
            bucket, used = [], 0
        for item, size in zip(module, sizes, strict=True):
            if splits_modules and bucket and used + size > bucket_bytes:
                yield bucket, False
                bucket, used = [], 0
            bucket.append(item)
            used = aligned(used + size)
    if bucket:
        yield bucket, True


def _module(name: str) -> str:
    return name.rsplit(".", 2)[0]
