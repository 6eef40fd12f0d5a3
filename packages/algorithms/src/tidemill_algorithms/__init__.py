"""Advantages, policy losses and corrections as pure functions over ragged batches.

The examples of the functions use this batch, three responses to two problems:

>>> import torch
>>> from tidemill_dataproto import DataProto, ragged
>>> mask = ragged.ragged(torch.ones(6), lengths=[2, 3, 1])
>>> columns = {"response_mask": mask, "rewards": torch.tensor([1.0, 0.0, 1.0])}
>>> batch = DataProto.from_dict(columns, {"uid": ["a", "a", "b"]})
"""

from tidemill_algorithms.advantages import ADV_ESTIMATORS
from tidemill_algorithms.groups import Groups

__all__ = ["ADV_ESTIMATORS", "Groups"]
