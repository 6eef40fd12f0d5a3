"""Policy losses: functions `(log_probs, batch, *, options) -> (terms, metrics)` over flat tokens, by name.

The examples of this package use the batch of `tidemill_algorithms`: three responses to two problems.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tidemill_algorithms.losses.contract import PolicyLoss
from tidemill_algorithms.losses.policy_gradient import policy_gradient
from tidemill_algorithms.losses.vanilla import vanilla

__all__ = ["POLICY_LOSSES", "PolicyLoss", "policy_gradient", "vanilla"]

POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType({"policy_gradient": policy_gradient, "vanilla": vanilla})
