"""Tensors that belong together."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def by_module(items: Iterable[T], name: Callable[[T], str]) -> Iterator[list[T]]:
    """Groups neighbours whose names are equal up to the last two parts, reading one item ahead.

    These are the parts of one module, as `layers.0.self_attn.q_proj.weight` and `layers.0.self_attn.k_proj.bias`. What
    a loader has to combine lies in one module: projections that an engine fuses, a weight and its scale.
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
    """Groups items as `by_module` does, wherever they stand, in the order in which modules first appear."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(_module(name(item)), []).append(item)
    return list(groups.values())


def _module(name: str) -> str:
    return name.rsplit(".", 2)[0]
