"""Advantage estimators: functions `(batch, *, options) -> columns`, by name.

The examples of this package use the batch of `tidemill_algorithms`: three responses to two problems.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tidemill_algorithms.advantages.contract import Estimator, columns_of, reads, uses_token_rewards
from tidemill_algorithms.advantages.grpo import grpo
from tidemill_algorithms.advantages.opo import opo
from tidemill_algorithms.advantages.remax import remax
from tidemill_algorithms.advantages.rloo import rloo

__all__ = [
    "ADV_ESTIMATORS",
    "Estimator",
    "columns_of",
    "grpo",
    "opo",
    "reads",
    "remax",
    "rloo",
    "uses_token_rewards",
]

ADV_ESTIMATORS: Mapping[str, Estimator] = MappingProxyType({"grpo": grpo, "opo": opo, "remax": remax, "rloo": rloo})
