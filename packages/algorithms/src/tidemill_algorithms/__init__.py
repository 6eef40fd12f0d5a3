"""Advantages, policy losses and corrections as pure functions over ragged batches.

The examples of the functions use this batch, three responses to two problems:

>>> import torch
>>> from tidemill_dataproto import DataProto, ragged
>>> mask = ragged.ragged(torch.ones(6), lengths=[2, 3, 1])
>>> columns = {"response_mask": mask, "rewards": torch.tensor([1.0, 0.0, 1.0])}
>>> batch = DataProto.from_dict(columns, {"uid": ["a", "a", "b"]})

Those of the losses also this one, sampled with probability 1 per token:

>>> columns = {"old_log_probs": ragged.like(torch.zeros(6), mask),
...            "advantages": ragged.like(torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0]), mask)}
>>> on_policy = DataProto.from_dict({"response_mask": mask, **columns})
"""

from tidemill_algorithms.actor_loss import ActorLoss
from tidemill_algorithms.advantages import ADV_ESTIMATORS
from tidemill_algorithms.aggregation import token_weights
from tidemill_algorithms.correction import rollout_correction
from tidemill_algorithms.critic_loss import CriticLoss
from tidemill_algorithms.filters import has_signal
from tidemill_algorithms.groups import Groups
from tidemill_algorithms.kl import AdaptiveKLController, FixedKLController, kl_penalty
from tidemill_algorithms.losses import POLICY_LOSSES
from tidemill_algorithms.rewards import overlong_penalty, token_rewards
from tidemill_algorithms.whitening import whiten

__all__ = [
    "ADV_ESTIMATORS",
    "ActorLoss",
    "AdaptiveKLController",
    "CriticLoss",
    "FixedKLController",
    "Groups",
    "POLICY_LOSSES",
    "has_signal",
    "kl_penalty",
    "overlong_penalty",
    "rollout_correction",
    "token_rewards",
    "token_weights",
    "whiten",
]
