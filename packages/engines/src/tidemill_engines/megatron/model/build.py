"""Megatron's model for a Hugging Face architecture."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_engines.megatron.model.attention import PackedAttention
from tidemill_engines.megatron.model.transformer_engine import Implementation, prepare, use_transformer_engine
from tidemill_engines.megatron.moe.router import RoutedModel, Router
from tidemill_engines.megatron.patches.experts import GroupedExperts
from tidemill_engines.megatron.patches.rms_norm import RMSNorm
from tidemill_engines.megatron.weights.names import padded_vocab_size


class HiddenStatesModel(RoutedModel):
    """Megatron's model without the product with its head; the engine computes log-probabilities without logits."""

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def transformer_config(
    architecture: Architecture,
    parallel: MegatronConfig,
    dtype: torch.dtype,
    *,
    implementation: Implementation = "local",
    fused: bool = False,
    recompute: Sequence[str] = (),
) -> TransformerConfig:
    """Return Megatron's own configuration.

    Args:
        implementation: implementation of the layers.
        fused: compile activation, rotary embedding and sums of expert outputs to few kernels. Megatron's other fusions
            need Apex, or have no effect without biases and dropout.
        recompute: modules that the backward recomputes, by Megatron's names, or ("full",) for whole layers.
    """
    a = architecture
    kind = TransformerConfig if a.latent is None else MLATransformerConfig
    return kind(
        num_layers=a.num_hidden_layers,
        hidden_size=a.hidden_size,
        ffn_hidden_size=a.intermediate_size,
        num_attention_heads=a.num_attention_heads,
        num_query_groups=a.num_key_value_heads,
        kv_channels=a.head_dim,
        layernorm_epsilon=a.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=a.qkv_bias,
        qk_layernorm=a.qk_norm or a.latent is not None,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are loaded or initialized later.
        init_method=_no_init,
        output_layer_init_method=_no_init,
        embedding_init_method=_no_init,
        calculate_per_token_loss=True,
        transformer_impl=implementation,
        **_parallel_fields(parallel, a),
        **_moe_fields(a),
        **_recompute_fields(recompute),
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=fused,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def _parallel_fields(parallel: MegatronConfig, architecture: Architecture) -> dict[str, Any]:
    """Parallel sizes, and communication between ranks."""
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tp,
        "sequence_parallel": parallel.sequence_parallel,
        # Rows have any length. Megatron then requires the alltoall dispatcher, also for dense models.
        "variable_seq_lengths": parallel.pipeline_model_parallel_size > 1,
        "moe_token_dispatcher_type": parallel.token_dispatcher(architecture),
        # With Megatron's defaults, interleaved chunks exchange wrong tensors without an error.
        "overlap_p2p_comm": parallel.virtual_pipeline_model_parallel_size is not None,
        "batch_p2p_comm": parallel.virtual_pipeline_model_parallel_size is None,
    }


def _moe_fields(a: Architecture) -> dict[str, Any]:
    """Fields of MoE models."""
    if not a.num_experts:
        return {}
    return {
        "num_moe_experts": a.num_experts,
        "moe_ffn_hidden_size": a.moe_intermediate_size,
        "moe_router_topk": a.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": not a.norm_topk_prob,
        "moe_router_dtype": "fp32",
        **_deepseek_fields(a),
    }


def _deepseek_fields(a: Architecture) -> dict[str, Any]:
    """Fields of MLA and its router."""
    if a.latent is None or a.router is None:
        return {}
    latent, yarn = a.latent, dict(a.latent.yarn)
    has_groups = a.router.num_groups > 1
    return {
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": latent.rope_theta,
        "rotary_scaling_factor": yarn.get("factor", 1.0),
        "mscale": yarn.get("mscale", 1.0),
        "mscale_all_dim": yarn.get("mscale_all_dim", 0.0),
        **{name: yarn[name] for name in ("beta_fast", "beta_slow", "original_max_position_embeddings") if name in yarn},
        "moe_layer_freq": [int(layer >= a.num_dense_layers) for layer in range(a.num_hidden_layers)],
        "moe_shared_expert_intermediate_size": a.shared_intermediate_size,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": a.router.num_groups if has_groups else None,
        "moe_router_group_topk": a.router.top_groups if has_groups else None,
        "moe_router_topk_scaling_factor": a.router.scaling_factor,
    }


def _no_init(weight: torch.Tensor) -> None:
    pass


def _recompute_fields(modules: Sequence[str]) -> dict[str, Any]:
    if not modules:
        return {}
    if tuple(modules) == ("full",):
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def build_chunks(architecture: Architecture, config: TransformerConfig) -> list[HiddenStatesModel]:
    """Build the model chunks of this rank's pipeline stage. Their weights are not initialized."""
    num_chunks = config.virtual_pipeline_model_parallel_size
    return [_chunk(architecture, config, stage) for stage in ([None] if num_chunks is None else range(num_chunks))]


def _chunk(architecture: Architecture, config: TransformerConfig, vp_stage: int | None) -> HiddenStatesModel:
    first = get_transformer_layer_offset(config, vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage))
    has_te = config.transformer_impl == "transformer_engine"
    layers = TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config, is_dense=number < architecture.num_dense_layers) for number in numbers],
        layer_norm=TENorm if has_te else RMSNorm,  # type: ignore[arg-type] - a class is accepted like a ModuleSpec
    )
    model = HiddenStatesModel(
        config,
        layers,  # type: ignore[arg-type] - the submodules of a block are accepted
        vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        position_embedding_type="none",  # applied by `PackedAttention`
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        vp_stage=vp_stage,
    )
    if has_te:
        prepare(model)
    return model


def _layer_spec(config: TransformerConfig, *, is_dense: bool) -> ModuleSpec:
    num_experts = None if is_dense else config.num_moe_experts
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        # Replicated: if they are split, Megatron drops other ranks' gradients of the rotary part of keys.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if num_experts:
        layer.mlp.submodules.router = Router
        layer.mlp.submodules.experts.module = GroupedExperts
    if config.transformer_impl == "transformer_engine":
        use_transformer_engine(spec, config)
    return spec
