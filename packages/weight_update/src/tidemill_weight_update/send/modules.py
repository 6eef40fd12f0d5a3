"""Grouping of tensors by the module they belong to."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

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


def _module(name: str) -> str:
    return name.rsplit(".", 2)[0]
