"""Filters of groups."""

import torch

from tidemill_algorithms.groups import Groups

__all__ = ["has_signal"]


def has_signal(groups: Groups, values: torch.Tensor | None = None) -> torch.Tensor:
    """Return which groups have episodes with different rewards; in the others all advantages of `grpo` are 0.

    Dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 11) keeps these groups and samples more problems for
    the others. A group of one has no signal.

    Args:
        groups: groups of a batch.
        values: float [E], compared instead of the rewards, such as accuracies.

    Returns:
        bool [G].

    >>> groups = Groups.of(batch)
    >>> has_signal(groups)
    tensor([ True, False])
    >>> rows = has_signal(groups)[groups.group][groups.episode]
    >>> len(batch[rows])
    2
    """
    values = groups.rewards if values is None else values.double()
    lowest, highest = (
        torch.zeros_like(groups.counts).scatter_reduce(0, groups.group, values, how, include_self=False)
        for how in ("amin", "amax")
    )
    return lowest < highest
