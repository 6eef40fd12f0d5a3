"""The custom weight loader: SGLang calls it in each rank of an engine that was launched with `sglang_launch_args()`."""

import logging
from importlib.metadata import version
from typing import Any

from torch import Tensor, nn

from tidemill_weight_update.control.descriptor import request_from_json
from tidemill_weight_update.plan.plan import StoredPlans
from tidemill_weight_update.receive import Receiver

logger = logging.getLogger(__name__)

# SGLang calls a function by name, so state between updates is stored here, by model, for the life of the process.
_receivers: dict[nn.Module, Receiver] = {}


def load(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Execute the request that is passed in place of a tensor's name.

    Nothing is raised, because an exception would crash SGLang's scheduler. A rank that fails reports it in the
    trainer's mailbox; if it cannot even do that, its state stays unchanged, which the trainer treats as a failure too.
    """
    try:
        request = request_from_json(named_tensors[0][0])
        receiver = _receivers.get(model)
        if receiver is None:
            receiver = _receivers[model] = _new_receiver(model)
        receiver.handle(request)
    except Exception:
        logger.exception("refused a weight update")


def _new_receiver(model: nn.Module) -> Receiver:
    from sglang.srt.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    config: Any = model.config
    tied = bool(getattr(config, "tie_word_embeddings", False))

    def may_ignore(name: str) -> bool:
        return (tied and name == "lm_head.weight") or "rotary_emb." in name

    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    return Receiver(model, rank, size, may_ignore, lambda: finish_load(model), _stored_plans(model, rank, size))


def _stored_plans(model: nn.Module, rank: int, size: int) -> StoredPlans | None:
    """Return the plans on disk; None if experts may move, because then a plan is valid for a moment only."""
    from sglang.srt.runtime_context import get_server_args

    server: Any = get_server_args()
    config: Any = model.config
    if server.enable_eplb or server.init_expert_location != "trivial":
        return None
    return StoredPlans(model, [version("sglang"), server.quantization, config.to_dict(), rank, size])


def finish_load(model: nn.Module) -> None:
    """Recompute what a model derives from its weights. Call it after the copies and after `load_weights`.

    This is SGLang's protocol for loaders that do not call `load_weights` (`_post_load_weights` in
    `srt/model_loader/loader.py` of 0.5.17): a model that derives tensors from its parameters, such as MLA models that
    split kv_b_proj into w_kc and w_vc, has a method `post_load_weights`.
    """
    post_load_weights = getattr(model, "post_load_weights", None)
    if post_load_weights is not None:
        post_load_weights()
