"""Transformer Engine in Megatron's layers, where it is installed: norms, linear layers, how tokens get to experts."""

from typing import Any, Literal

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
    fused_permute_with_probs,
    fused_unpermute,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from torch import nn

from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.patches.dispatcher import Dispatcher, replace_dispatchers

Implementation = Literal["local", "transformer_engine"]

IS_INSTALLED = HAVE_TE and fused_permute_with_probs is not None  # which came with 2.1
_INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]'"


def implementation(
    wanted: Literal["auto", "local", "transformer_engine"],
    architecture: Architecture,
    device: torch.device,
    dtype: torch.dtype,
) -> Implementation:
    """What layers are made of. Float32 is left to torch by "auto", as Transformer Engine multiplies it in TF32.

    Raises:
        ValueError: Transformer Engine is asked for by name and cannot be had; it says why.
    """
    obstacle = None
    if device.type != "cuda":
        obstacle = f"it has no kernels for a {device.type.upper()}; use 'auto' or 'local'"
    elif architecture.latent is not None:
        obstacle = f"the latent attention of a {architecture.model_type} is not made of it; use 'auto' or 'local'"
    elif not IS_INSTALLED:
        obstacle = f"it is not installed, not for this version of torch, or older than 2.1: {_INSTALL}"
    if obstacle is not None and wanted == "transformer_engine":
        raise ValueError(f"MegatronConfig.transformer_impl is 'transformer_engine', but {obstacle}")
    is_chosen = wanted == "transformer_engine" or (wanted == "auto" and dtype != torch.float32)
    return "transformer_engine" if is_chosen and obstacle is None else "local"


def use_transformer_engine(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Replaces modules of a layer as it is made without Transformer Engine, but for attention, router and experts.

    A norm is one module with the linear layer behind it, unless it is computed again in the backward: Megatron does so
    with modules. Checkpoints have the same names either way, and as without Transformer Engine.
    """
    parts: Any = layer.submodules
    attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else None
    joins = recomputed is None or "layernorm" not in recomputed
    norm, column = (IdentityOp, TELayerNormColumnParallelLinear) if joins else (TENorm, TEColumnParallelLinear)
    parts.input_layernorm, attention.linear_qkv = norm, column
    attention.linear_proj = TERowParallelLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TENorm
    if isinstance(mlp, MLPSubmodules):
        parts.pre_mlp_layernorm, mlp.linear_fc1, mlp.linear_fc2 = norm, column, TERowParallelLinear
    else:
        parts.pre_mlp_layernorm = TENorm


def prepare(model: nn.Module) -> None:
    """Completes a model that Megatron has made with modules of Transformer Engine.

    Matrix products of the backward add gradients of weights to those of earlier micro-batches, in float32; not by
    Megatron's `gradient_accumulation_fusion`, for which its own linear layers want Apex. What is there is not written
    over in the first micro-batch, since a step may have several batches: Megatron tells modules which one is the first
    unless there is nothing to cache for FP8.
    """
    for module in model.modules():
        if isinstance(module, (TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear)):
            module.fuse_wgrad_accumulation = module.disable_parameter_transpose_cache = True
    replace_dispatchers(model, FusedDispatcher)


class FusedDispatcher(Dispatcher):
    """As `Dispatcher`, with one kernel each to copy tokens and to add copies up."""

    _rows: torch.Tensor  # where copies lie, as Transformer Engine notes it

    def _sorted(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert fused_permute_with_probs is not None
        num_copies = len(tokens) * self.config.moe_router_topk
        copies, of_copies, self._rows = fused_permute_with_probs(tokens, probs, routing_map, num_out_tokens=num_copies)
        return copies, of_copies

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((self.hidden_shape[:-1].numel(), self.hidden_shape[-1]))
        return fused_unpermute(permutated_local_input_tokens, self._rows, restore_shape=shape).view(self.hidden_shape)
