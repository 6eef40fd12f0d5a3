"""The custom weight loader: SGLang calls it in each rank of an engine that was launched with `sglang_launch_args()`."""

import logging
from typing import Any

from torch import Tensor, nn

from tidemill_weight_update.control.request import request_from_json
from tidemill_weight_update.plan.record import finish_load
from tidemill_weight_update.receive.receiver import Receiver

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

    return Receiver(
        model,
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
        may_ignore,
        lambda: finish_load(model),
    )
