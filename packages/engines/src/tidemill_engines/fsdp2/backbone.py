"""A sharded causal language model in two parts: the backbone that makes hidden states, and the head on top of it."""

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tidemill_engines.head.log_probs import Head

_METHOD = "tidemill_backbone"


def expose_backbone(model: PreTrainedModel) -> None:
    """Prepares a sharded model for `run_backbone` and `head_of`.

    The head lies in the root's group of weights, with the embedding that it may be tied to. That group is gathered once
    per forward and stays gathered until its gradient is reduced, or until `reshard()` if there is no backward: the
    backward pass needs the head first anyway. Layers are freed as they were configured.
    """
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(False, recurse=False)
    setattr(model, _METHOD, MethodType(_forward_without_head, model))
    register_fsdp_forward_method(model, _METHOD)


def share_tokens(language_model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Has the decoder of a vision-language model take this rank's run of the tokens, after images were put into them.

    Each rank of the group computes the embeddings of all tokens and images; the gradient is that of its own run, as
    everywhere in sequence parallelism.
    """
    share, num_shares = dist.get_rank(group), dist.get_world_size(group)

    def take_run(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = dict(kwargs)
        kwargs["inputs_embeds"] = kwargs["inputs_embeds"].chunk(num_shares, 1)[share]
        is_visual = kwargs.get("visual_pos_masks")
        if is_visual is not None:  # features of images that are added to the first layers
            runs = is_visual.chunk(num_shares, 1)
            start, size = (sum(int(run.sum()) for run in part) for part in (runs[:share], runs[share : share + 1]))
            kwargs["visual_pos_masks"] = runs[share]
            kwargs["deepstack_visual_embeds"] = [
                features[start : start + size] for features in kwargs["deepstack_visual_embeds"]
            ]
        return args, kwargs

    language_model.register_forward_pre_hook(take_run, with_kwargs=True)


def run_backbone(model: PreTrainedModel, **inputs: Any) -> Any:
    """Runs a model without its head; `inputs` are those of its backbone, whose output it returns."""
    return getattr(model, _METHOD)(**inputs)


def _forward_without_head(model: PreTrainedModel, **inputs: Any) -> Any:
    backbone = model.base_model
    assert backbone is not model, f"{type(model).__name__} has no backbone of its own"
    return backbone(**inputs)


def head_of(model: PreTrainedModel) -> Head:
    """The model's head, with gathered weights; to be called after `run_backbone`.

    Raises:
        TypeError: the model's output embeddings are not a linear layer.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        raise TypeError(
            f"expected the output embeddings of {type(model).__name__} to be a torch.nn.Linear, got "
            f"{type(layer).__name__}; only causal language models with a linear head are supported"
        )
    assert not isinstance(layer.weight, DTensor), "the head is sharded; run_backbone() gathers it"
    scale, softcap = logit_rule(model)
    return Head(weight=layer.weight, bias=layer.bias, scale=scale, softcap=softcap)


def logit_rule(model: PreTrainedModel) -> tuple[float, float | None]:
    """What the model multiplies its logits with, and what it bounds them by (None: nothing).

    These are the fields with which transformers' configs say it: `logit_scale` (Cohere), `logits_scaling` (Granite) and
    `final_logit_softcapping` (Gemma).
    """
    fields = model.config.get_text_config().to_dict()
    scale = float(fields.get("logit_scale", 1.0)) / float(fields.get("logits_scaling", 1.0))
    softcap = fields.get("final_logit_softcapping")
    return scale, None if softcap is None else float(softcap)
