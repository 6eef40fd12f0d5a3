"""Advantage estimators: functions `(batch, *, options) -> columns`, by name.

The examples of this package use the batch of `tidemill_algorithms`: three responses to two problems.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tidemill_algorithms.advantages.contract import Estimator
from tidemill_algorithms.advantages.gae import gae
from tidemill_algorithms.advantages.gdpo import gdpo
from tidemill_algorithms.advantages.grpo import grpo
from tidemill_algorithms.advantages.none import none
from tidemill_algorithms.advantages.opd import opd
from tidemill_algorithms.advantages.opo import opo
from tidemill_algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from tidemill_algorithms.advantages.remax import remax
from tidemill_algorithms.advantages.rloo import rloo
from tidemill_algorithms.advantages.vapo import vapo
from tidemill_algorithms.columns import columns_of, reads, uses_token_rewards

__all__ = [
    "ADV_ESTIMATORS",
    "Estimator",
    "columns_of",
    "gae",
    "gdpo",
    "grpo",
    "none",
    "opd",
    "opo",
    "reads",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "uses_token_rewards",
    "vapo",
]

_ALL: list[Estimator] = [
    gae,
    gdpo,
    grpo,
    none,
    opd,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    vapo,
]
ADV_ESTIMATORS: Mapping[str, Estimator] = MappingProxyType({estimator.__name__: estimator for estimator in _ALL})
