"""From a trainer's tensor to the full tensor."""

import sys

import torch
from torch import Tensor

from tidemill_weight_update.bucket import sent_dtype


def full_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The global value of `tensor`: a collective for a DTensor, the tensor itself otherwise.

    A sharded or replicated DTensor is cast to `dtype` before it is gathered, so that the smaller type travels; the
    value is that of `full_tensor().to(dtype)` either way. The caller casts what was not cast here.
    """
    # A DTensor cannot exist before its module is loaded, which takes two seconds that other callers need not pay.
    if "torch.distributed.tensor" not in sys.modules:
        return tensor.detach()
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local = tensor.detach()
    if not any(placement.is_partial() for placement in tensor.placements):  # a cast sum is not the sum of casts
        local = local.to(sent_dtype(tensor, dtype))
    return local.full_tensor()
