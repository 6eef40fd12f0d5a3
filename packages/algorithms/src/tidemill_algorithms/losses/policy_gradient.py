"""The policy gradient without a ratio."""

import torch
from tidemill_dataproto import DataProto, ragged

__all__ = ["policy_gradient"]


def policy_gradient(log_probs: torch.Tensor, batch: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute -A log pi (Williams 1992, REINFORCE); unbiased only for the policy that sampled the tokens.

    This is the loss `gpg` of verl and of GPG (arXiv:2504.02546).

    Args:
        log_probs: [N], of the current policy.
        batch: ragged `advantages`.

    Returns:
        Terms [N]; no metrics.

    >>> policy_gradient(torch.full((6,), -2.0), on_policy)[0]
    tensor([ 2.,  2., -2., -2., -2.,  2.])
    """
    return -ragged.values(batch["advantages"]) * log_probs, {}
