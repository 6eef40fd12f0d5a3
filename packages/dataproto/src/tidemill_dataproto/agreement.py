"""What the ranks of a group tell each other before they do something together."""

import pickle
from typing import Any

import torch.distributed as dist

__all__ = ["agree"]


def agree(value: Any, error: Exception | None, group: dist.ProcessGroup | None) -> list[Any]:
    """Gathers one value of each rank, in rank order, or raises on all ranks what went wrong on one. Collective.

    Raises:
        ValueError: one rank came with an error, or with a value that cannot be pickled; it names the first such rank of
            the group and what it found.
    """
    data = b""
    if error is None:
        try:  # here, because torch would raise on this rank only, and the others would wait for it
            data = pickle.dumps(value, protocol=5)
        except Exception as caught:  # noqa: BLE001 - raised below, on all ranks; any, because a user's __reduce__ raises any
            error = TypeError(f"an object or fact of the batch cannot be pickled ({caught}); drop or convert it")
    reports: list[Any] = [None] * dist.get_world_size(group)
    text = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(reports, (data, text), group=group)
    for rank, (_, found) in enumerate(reports):
        if found is not None:
            raise ValueError(f"rank {rank} of {len(reports)}: {found}") from error
    return [pickle.loads(received) for received, _ in reports]
