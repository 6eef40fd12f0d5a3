"""An advantage estimator in a file of its own: MaxRL (Tajwar et al. 2026, arXiv:2602.02710).

tidemill train mine.toml algorithm.adv_estimator=packages/algorithms/examples/my_advantage.py:max_rl algorithm.eps=0.1
"""

import torch
from tidemill_algorithms import Groups
from tidemill_dataproto import DataProto


def max_rl(batch: DataProto, *, eps: float = 1e-6) -> dict[str, torch.Tensor]:
    """Compute (R - m) / (m + eps), with m the mean reward of the episodes of a problem.

    The gradient approaches that of log p, with p the probability of success, instead of that of p: a problem with
    successes in a tenth of its episodes weighs ten times as much. A group of one, of equal rewards, and so one without
    success, has advantage 0.

    Args:
        batch: the columns of `Groups.of`; rewards in [0, 1].
        eps: added to the mean.

    Returns:
        `advantages`, ragged float32 [B, j], equal for all tokens of an episode, 0 where the mask is 0.

    Raises:
        ValueError: a negative reward, with which the mean is no probability.
    """
    groups = Groups.of(batch)
    if (groups.rewards < 0).any():
        raise ValueError(f"max_rl requires rewards >= 0, got {groups.rewards.min().item()}")
    mean = groups.mean(groups.rewards)[groups.group]
    return {"advantages": groups.to_tokens(groups.centred(groups.rewards) / (mean + eps))}
