"""Run a sharded causal language model in two parts: the backbone that computes hidden states, and the head."""

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
    """Prepare a sharded model for `run_backbone` and `head_of`.

    The root's FSDP group contains the head, and the embedding that it may be tied to. The group is all-gathered once
    per forward and stays gathered until its gradient is reduced, or until `reshard()` without a backward, because the
    backward pass needs the head first. Layers are resharded as configured.
    """
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(False, recurse=False)
    setattr(model, _METHOD, MethodType(_forward_without_head, model))
    register_fsdp_forward_method(model, _METHOD)


def share_tokens(language_model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Pass only this rank's part of the tokens, with their images, to the decoder of a vision-language model.

    Each rank of the group computes the embeddings of all tokens and images; its gradient is that of its own part.
    """
    share, num_shares = dist.get_rank(group), dist.get_world_size(group)

    def take_run(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = dict(kwargs)
        kwargs["inputs_embeds"] = kwargs["inputs_embeds"].chunk(num_shares, 1)[share]
        is_visual = kwargs.get("visual_pos_masks")
        if is_visual is not None:  # image features that are added to the outputs of the first layers
            runs = is_visual.chunk(num_shares, 1)
            start, size = (sum(int(run.sum()) for run in part) for part in (runs[:share], runs[share : share + 1]))
            kwargs["visual_pos_masks"] = runs[share]
            kwargs["deepstack_visual_embeds"] = [
                features[start : start + size] for features in kwargs["deepstack_visual_embeds"]
            ]
        return args, kwargs

    language_model.register_forward_pre_hook(take_run, with_kwargs=True)


def run_backbone(model: PreTrainedModel, **inputs: Any) -> Any:
    """Run a model without its head; return the output of its backbone."""
    return getattr(model, _METHOD)(**inputs)


def _forward_without_head(model: PreTrainedModel, **inputs: Any) -> Any:
    backbone = model.base_model
    output = backbone(**inputs)
    if torch.is_grad_enabled() and not output.last_hidden_state.requires_grad:
        output.last_hidden_state.requires_grad_()  # else FSDP2 reduces no gradient of a head on a frozen backbone
    return output


def head_of(model: PreTrainedModel) -> Head:
    """Return the model's head with gathered weights; call it after `run_backbone`.

    Raises:
        TypeError: the model's output embeddings are not a linear layer.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        raise TypeError(
            f"the output embeddings of {type(model).__name__} must be a torch.nn.Linear, got {type(layer).__name__}; "
            "use a causal language model with a linear head"
        )
    assert not isinstance(layer.weight, DTensor), "the head is sharded; run_backbone() gathers it"
    scale, softcap = logit_rule(model)
    return Head(weight=layer.weight, bias=layer.bias, scale=scale, softcap=softcap)


def logit_rule(model: PreTrainedModel) -> tuple[float, float | None]:
    """Return the scale of the logits and their softcap, or None.

    The fields of transformers' configs are `logit_scale` (Cohere), `logits_scaling` (Granite divides by it, and
    HyperCLOVA X multiplies) and `final_logit_softcapping` (Gemma).
    """
    fields = model.config.get_text_config().to_dict()
    scale, scaling = (
        1.0 if fields.get(key) is None else float(fields[key]) for key in ("logit_scale", "logits_scaling")
    )
    scale = scale * scaling if fields["model_type"] == "hyperclovax" else scale / scaling
    softcap = fields.get("final_logit_softcapping")
    return scale, None if softcap is None else float(softcap)
