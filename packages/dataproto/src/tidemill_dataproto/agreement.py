"""What the ranks of a group tell each other before they do something together."""

from typing import Any

import torch.distributed as dist

__all__ = ["agree"]


def agree(value: Any, error: Exception | None, group: dist.ProcessGroup | None) -> list[Any]:
    """Gathers one value of each rank, in rank order, or raises on all ranks what went wrong on one. Collective.

    Raises:
        ValueError: one rank came with an error; it names the first such rank of the group and what it found.
    """
    reports: list[Any] = [None] * dist.get_world_size(group)
    text = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(reports, (value, text), group=group)
    for rank, (_, found) in enumerate(reports):
        if found is not None:
            raise ValueError(f"rank {rank} of {len(reports)}: {found}") from error
    return [value for value, _ in reports]
