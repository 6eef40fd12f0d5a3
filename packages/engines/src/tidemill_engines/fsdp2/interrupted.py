"""Reset a sharded model after an exception in a forward or backward pass.

torch's `fully_shard` tracks the progress of a step in private fields and resets them only at the end of a successful
step. Without a reset, the next backward pass assumes that its final callback is queued already and reduces no gradient,
without an error; and a group of weights with an interrupted forward is not resharded, so the optimizer and `zero_grad`
get the gathered parameters.
"""

import torch
from torch.distributed.fsdp import FSDPModule

from tidemill_engines.fsdp2.model import fsdp_modules


def reset_after_failure(model: torch.nn.Module) -> None:
    """Finish an interrupted forward or backward pass as torch finishes a successful one. No collectives.

    It calls torch's final callback of a backward pass, whatever fields that resets (2.11 has one
    `reduce_scatter_state`, later versions a list). Gradients that are not reduced yet are dropped first: ranks that
    failed at different layers could not reduce them together. Reduced gradients are left to `optimizer_zero_grad`.
    """
    modules = fsdp_modules(model)
    for module in modules:
        _drop_unreduced_grads(module)
    state = modules[0]._get_fsdp_state()
    if state._is_root is None:  # failed before the first forward, which creates the shared fields
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
        if hasattr(param, "_unsharded_param"):  # exists after the first all-gather
            param._unsharded_param.grad = None
