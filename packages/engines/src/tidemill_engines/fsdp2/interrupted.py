"""Sharded models that an exception has left in the middle of a forward or a backward.

torch's `fully_shard` keeps in private fields how far a step has come, and resets them only at the end of one that went
well. Left as they are, the next backward finds its last work queued already and reduces no gradient at all, without an
error; and a group of weights whose forward was broken off is not resharded, so that whoever asks the model for its
parameters (the optimizer, `zero_grad`) is given the gathered ones.
"""

import torch
from torch.distributed.fsdp import FSDPModule

from tidemill_engines.fsdp2.model import fsdp_modules


def settle(model: torch.nn.Module) -> None:
    """Ends the forward or backward that was broken off, as torch ends one that went well. Without collectives.

    torch's own last work of a backward does that, whatever the fields that it resets are called (2.11 has one
    `reduce_scatter_state`, later versions a list). Gradients that were not reduced over the ranks are forgotten first,
    so that it has none to reduce, which ranks that have come differently far could not do together. Gradients that were
    reduced already are left to `optimizer_zero_grad`.
    """
    modules = fsdp_modules(model)
    for module in modules:
        _drop_unreduced_grads(module)
    state = modules[0]._get_fsdp_state()
    if state._is_root is None:  # broken off before the first forward, so there are no shared fields yet
        return
    modules[0].set_requires_gradient_sync(True)
    modules[0].set_is_last_backward(True)
    state._root_post_backward_final_callback()
    state._state_ctx.iter_forward_root = None
    state._comm_ctx.all_gather_state = None


def _drop_unreduced_grads(module: FSDPModule) -> None:
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    group._partial_reduce_output = None
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):  # from the first time that it is gathered
            param._unsharded_param.grad = None
