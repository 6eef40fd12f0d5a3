"""The clipped loss of a critic."""

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.losses.contract import require_not_negative

__all__ = ["value_loss"]


def value_loss(
    values: torch.Tensor, batch: DataProto, *, cliprange_value: float = 0.5
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute 0.5 max((v - R)^2, (clip(v, v_old - range, v_old + range) - R)^2).

    The form of OpenAI's baselines of PPO; the paper has no clip. verl has the same factor of 0.5, slime has none.

    Args:
        values: [N], of the current critic.
        batch: ragged `values` of the critic that computed the advantages, and `returns`.
        cliprange_value: distance of a value from the old one beyond which it has no gradient towards the return.

    Returns:
        Terms [N]; metrics `critic/vf_clipfrac` and `critic/vpred_mean`.

    >>> columns = {"values": torch.zeros(6), "returns": torch.tensor([1.0, 1.0, -1.0, 0.0, 2.0, 0.5])}
    >>> seen = DataProto.from_dict({name: ragged.like(column, mask) for name, column in columns.items()})
    >>> value_loss(torch.tensor([0.4, 0.8, 0.8, 0.0, 1.0, 0.5]), seen)[0]
    tensor([0.1800, 0.1250, 1.6200, 0.0000, 1.1250, 0.0000])
    """
    require_not_negative(cliprange_value=cliprange_value)
    old, returns = ragged.values(batch["values"]), ragged.values(batch["returns"])
    plain = (values - returns).square()
    clipped = (values.clamp(old - cliprange_value, old + cliprange_value) - returns).square()
    metrics = {"critic/vf_clipfrac": clipped > plain, "critic/vpred_mean": values.detach()}
    return 0.5 * torch.maximum(plain, clipped), metrics
