"""Policy losses: functions `(log_probs, batch, *, options) -> (terms, metrics)` over flat tokens, by name.

The examples of this package use the batch of `tidemill_algorithms`: three responses to two problems.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tidemill_algorithms.columns import columns_of, reads
from tidemill_algorithms.losses.cispo import cispo
from tidemill_algorithms.losses.contract import PolicyLoss
from tidemill_algorithms.losses.dppo_tv import dppo_tv
from tidemill_algorithms.losses.forward_kl_topk import forward_kl_topk
from tidemill_algorithms.losses.geo_mean import geo_mean
from tidemill_algorithms.losses.gspo import gspo
from tidemill_algorithms.losses.policy_gradient import policy_gradient
from tidemill_algorithms.losses.sapo import sapo
from tidemill_algorithms.losses.value import value_loss
from tidemill_algorithms.losses.vanilla import vanilla

__all__ = [
    "POLICY_LOSSES",
    "PolicyLoss",
    "cispo",
    "columns_of",
    "dppo_tv",
    "forward_kl_topk",
    "geo_mean",
    "gspo",
    "policy_gradient",
    "reads",
    "sapo",
    "value_loss",
    "vanilla",
]

POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "cispo": cispo,
        "dppo_tv": dppo_tv,
        "forward_kl_topk": forward_kl_topk,
        "geo_mean": geo_mean,
        "gspo": gspo,
        "policy_gradient": policy_gradient,
        "sapo": sapo,
        "vanilla": vanilla,
    }
)
