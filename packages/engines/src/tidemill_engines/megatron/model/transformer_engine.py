"""Transformer Engine in Megatron's layers, where it is installed: norms, linear layers, and token permutation."""

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

IS_INSTALLED = HAVE_TE and fused_permute_with_probs is not None  # since version 2.1
_INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]'"


def implementation(
    wanted: Literal["auto", "local", "transformer_engine"],
    architecture: Architecture,
    device: torch.device,
    dtype: torch.dtype,
) -> Implementation:
    """Choose the implementation of the layers.

    "auto" uses torch for float32, which Transformer Engine computes in TF32.

    Raises:
        ValueError: `wanted` is "transformer_engine" and it cannot be used; the message gives the reason.
    """
    obstacle = None
    if device.type != "cuda":
        obstacle = f"it has no kernels for a {device.type.upper()}; use 'auto' or 'local'"
    elif architecture.latent is not None:
        obstacle = f"it does not support the MLA of {architecture.model_type}; use 'auto' or 'local'"
    elif not IS_INSTALLED:
        obstacle = (
            f"it is not installed, not built for this version of torch, or older than 2.1; install it with "
            f"`{_INSTALL}`, or use 'auto' or 'local'"
        )
    if obstacle is not None and wanted == "transformer_engine":
        raise ValueError(f"MegatronConfig.transformer_impl is 'transformer_engine', but {obstacle}")
    is_chosen = wanted == "transformer_engine" or (wanted == "auto" and dtype != torch.float32)
    return "transformer_engine" if is_chosen and obstacle is None else "local"


def use_transformer_engine(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Replace modules of a layer spec by Transformer Engine's, except attention, router and experts.

    A norm is merged with the linear layer that follows it, unless the norm is recomputed in the backward, because
    Megatron recomputes whole modules. Checkpoints have the same names in all cases.
    """
    parts: Any = layer.submodules
    attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else None
    merges = recomputed is None or "layernorm" not in recomputed
    norm, column = (IdentityOp, TELayerNormColumnParallelLinear) if merges else (TENorm, TEColumnParallelLinear)
    parts.input_layernorm, attention.linear_qkv = norm, column
    attention.linear_proj = TERowParallelLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TENorm
    if isinstance(mlp, MLPSubmodules):
        parts.pre_mlp_layernorm, mlp.linear_fc1, mlp.linear_fc2 = norm, column, TERowParallelLinear
    else:
        parts.pre_mlp_layernorm = TENorm


def prepare(model: nn.Module) -> None:
    """Configure a model that Megatron built with modules of Transformer Engine.

    Matrix products of the backward accumulate weight gradients in float32. This does not use Megatron's
    `gradient_accumulation_fusion`, for which its own linear layers need Apex. `disable_parameter_transpose_cache` keeps
    Megatron from marking the first micro-batch, whose gradients would overwrite those of earlier batches of the step.
    """
    for module in model.modules():
        if isinstance(module, (TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear)):
            module.fuse_wgrad_accumulation = module.disable_parameter_transpose_cache = True
    replace_dispatchers(model, FusedDispatcher)


class FusedDispatcher(Dispatcher):
    """`Dispatcher` with Transformer Engine's kernels to copy tokens and to sum copies."""

    _row_map: torch.Tensor  # order of the copies, in Transformer Engine's format

    def _permute(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert fused_permute_with_probs is not None
        num_copies = len(tokens) * self.config.moe_router_topk
        copies, probs_of_copies, self._row_map = fused_permute_with_probs(
            tokens, probs, routing_map, num_out_tokens=num_copies
        )
        return copies, probs_of_copies

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((self.hidden_shape[:-1].numel(), self.hidden_shape[-1]))
        return fused_unpermute(permutated_local_input_tokens, self._row_map, restore_shape=shape).view(
            self.hidden_shape
        )
