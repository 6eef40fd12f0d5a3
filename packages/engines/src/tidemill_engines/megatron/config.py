"""Configuration of the Megatron engine, and the checks of a model against it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

from tidemill_engines.config import (
    Dtype,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    check_choice,
    check_names,
    check_range,
)
from tidemill_engines.megatron.architecture import Architecture

_RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe")
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_last_pipeline_stage",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
TokenDispatcher = Literal["auto", "alltoall", "allgather"]
TransformerImpl = Literal["auto", "local", "transformer_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronConfig(EngineConfig):
    """Settings of the Megatron engine, in addition to those of `EngineConfig`. Names are Megatron's.

    Data parallelism uses the ranks that the parallel sizes leave over. `param_dtype` is also the dtype of the
    parameters: for bfloat16 parameters the optimizer keeps float32 master weights, which only checkpoints contain;
    exported weights are the parameters, cast if another dtype is requested.

    Attributes:
        tensor_model_parallel_size: number of ranks that share each layer (TP).
        pipeline_model_parallel_size: number of pipeline stages (PP).
        virtual_pipeline_model_parallel_size: model chunks per pipeline stage (interleaved schedule); None is one.
        num_layers_in_last_pipeline_stage: layers of the last stage, which also computes the head; None is as many as
            in other stages.
        context_parallel_size: number of ranks that share the tokens of each row (CP).
        expert_model_parallel_size: number of ranks that share the experts of a MoE layer (EP).
        expert_tensor_parallel_size: number of ranks that share each expert; None is `tensor_model_parallel_size`.
        moe_token_dispatcher_type: collective that sends tokens to experts: "alltoall" each token to the ranks of its
            experts, "allgather" (not with pipeline stages) each token once to all ranks that share the experts; "auto"
            is "allgather" where these are fewer than the experts of a token, and "alltoall" elsewhere.
        sequence_parallel: divide the tokens of norms and dropout among the tensor-parallel ranks.
        transformer_impl: implementation of the layers. "transformer_engine" requires Transformer Engine and CUDA;
            "local" uses the modules of Megatron and of this package; "auto" uses Transformer Engine where it is
            available and parameters are bfloat16 (it multiplies float32 in TF32), except for MLA.
        use_distributed_optimizer: shard the optimizer state over data-parallel ranks.
        overlap_grad_reduce: reduce gradients during the backward pass.
        overlap_param_gather: all-gather updated weights during the next forward pass.
        recompute_modules: modules that `ModelConfig.recompute="selective"` recomputes in the backward pass:
            "layernorm", "mlp", "core_attn", "moe".
        fuse_elementwise: compile activation and rotary embedding into fused kernels on CUDA (torch.compile).
        router_replay: MoE models: `infer_batch` returns the column `routed_experts`, int32 [B, j, L, K], with the
            experts of each token of `input_ids` in each layer. A batch with this column (from `infer_batch` or from the
            rollout) sends its tokens to these experts, also in training; -1 leaves a token to the router. If False, a
            batch with this column is rejected.
        seed: seed of Megatron's random states. The engines of a process share these; the first engine's seed is used.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or a setting requires another one.
    """

    backend: Literal["megatron"] = "megatron"
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    moe_token_dispatcher_type: TokenDispatcher = "auto"
    sequence_parallel: bool = False
    transformer_impl: TransformerImpl = "auto"
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute_modules: tuple[str, ...] = ("layernorm", "mlp")
    fuse_elementwise: bool = True
    router_replay: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check_choice(self, "param_dtype", self.param_dtype, ("float32", "bfloat16"))
        check_choice(self, "transformer_impl", self.transformer_impl, get_args(TransformerImpl))
        check_names(self, "recompute_modules", self.recompute_modules)
        for module in self.recompute_modules:
            check_choice(self, "recompute_modules", module, _RECOMPUTED)
        check_range(self, "seed", self.seed, low=0)
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "MegatronConfig.overlap_param_gather requires use_distributed_optimizer and overlap_grad_reduce; set "
                "both to True, or overlap_param_gather to False"
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        for name in _SIZES:
            if getattr(self, name) is not None:
                check_range(self, name, getattr(self, name), low=1)
        check_choice(self, "moe_token_dispatcher_type", self.moe_token_dispatcher_type, get_args(TokenDispatcher))
        has_stages = self.pipeline_model_parallel_size > 1
        if self.moe_token_dispatcher_type == "allgather" and has_stages:
            raise ValueError(
                "MegatronConfig.moe_token_dispatcher_type='allgather' does not support pipeline parallelism, as packed "
                "rows have different lengths in each micro-batch; use 'alltoall' with pipeline_model_parallel_size > 1"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("MegatronConfig.sequence_parallel requires tensor_model_parallel_size > 1; got 1")
        if self.virtual_pipeline_model_parallel_size is not None and not has_stages:
            raise ValueError(
                "MegatronConfig.virtual_pipeline_model_parallel_size requires pipeline_model_parallel_size > 1; got 1"
            )
        if self.num_layers_in_last_pipeline_stage is not None and (
            not has_stages or self.virtual_pipeline_model_parallel_size is not None
        ):
            raise ValueError(
                "MegatronConfig.num_layers_in_last_pipeline_stage requires pipeline_model_parallel_size > 1 and no "
                f"virtual_pipeline_model_parallel_size; got {self.pipeline_model_parallel_size} and "
                f"{self.virtual_pipeline_model_parallel_size}"
            )

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def token_dispatcher(self, architecture: Architecture) -> Literal["alltoall", "allgather"]:
        """Return the collective that sends tokens to experts. The one of "auto" moves fewer bytes."""
        if self.moe_token_dispatcher_type != "auto":
            return self.moe_token_dispatcher_type
        num_ranks = self.expert_model_parallel_size * self.expert_tp
        if 1 < num_ranks < architecture.num_experts_per_tok and self.pipeline_model_parallel_size == 1:
            return "allgather"
        return "alltoall"

    @property
    def ranks_per_row(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def max_tokens(self) -> int:
        return self.max_token_len_per_gpu * self.context_parallel_size

    @property
    def environment(self) -> dict[str, str]:
        # Tensor-parallel communication overlaps with kernels only if it starts before them.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if self.tensor_model_parallel_size > 1 else {}

    @property
    def replays_routing(self) -> bool:
        return self.router_replay

    def with_router_replay(self) -> Self:
        return replace(self, router_replay=True)

    def weight_dtype(self, model: ModelConfig) -> Dtype:
        return self.param_dtype

    def world_size_divisors(self) -> dict[str, int]:
        return {"tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size": self.ranks_per_row}

    def recomputed(self, model: ModelConfig) -> tuple[str, ...]:
        """Return the modules that the backward pass recomputes, by Megatron's names; ("full",) is whole layers."""
        if not model.gradient_checkpointing:
            return ()
        return self.recompute_modules if model.recompute == "selective" else ("full",)

    def check(self, model: ModelConfig, optimizer: OptimizerConfig | None, world_size: int) -> None:
        check_settings(model, optimizer)
        self.check_architecture(Architecture.read(Path(model.path)), world_size)

    def check_architecture(self, architecture: Architecture, world_size: int) -> None:
        """Check that the model and the ranks can be divided as configured. No communication.

        Raises:
            ValueError: a parallel size does not divide a size of the model or the world size; the message names both.
        """
        a = architecture
        tp, pp, cp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size
        ep, etp = self.expert_model_parallel_size, self.expert_tp
        if ep > 1 and not a.num_experts:
            raise ValueError(f"expert_model_parallel_size must be 1: {a.model_type} has no experts; got {ep}")
        if a.num_experts and tp > 1 and not self.sequence_parallel:
            raise ValueError(
                f"Megatron requires sequence_parallel=True to train a MoE model with tensor_model_parallel_size = {tp}"
                "; set sequence_parallel=True"
            )
        has_dense_mlp = a.num_dense_layers or not a.num_experts
        for divisor, number, size, divided in (
            (tp * pp * cp, world_size, "tp x pp x cp", f"world size {world_size}"),
            (tp, a.num_attention_heads, "tensor_model_parallel_size", f"{a.num_attention_heads} attention heads"),
            (tp, a.num_key_value_heads, "tensor_model_parallel_size", f"{a.num_key_value_heads} key and value heads"),
            (
                tp if has_dense_mlp else 1,
                a.intermediate_size,
                "tensor_model_parallel_size",
                f"intermediate_size {a.intermediate_size}",
            ),
            (
                tp,
                a.shared_intermediate_size,
                "tensor_model_parallel_size",
                f"intermediate size {a.shared_intermediate_size} of the shared experts",
            ),
            self._layer_division(a),
            (etp * ep * pp, world_size, "etp x ep x pp", f"world size {world_size}"),
            (ep if a.num_experts else 1, a.num_experts, "expert_model_parallel_size", f"{a.num_experts} experts"),
            (
                etp if a.num_experts else 1,
                a.moe_intermediate_size,
                "expert_tensor_parallel_size",
                f"moe_intermediate_size {a.moe_intermediate_size}",
            ),
        ):
            if number % divisor:
                advice = (
                    "lower a parallel size or start more ranks (in the trainer: actor.num_workers)"
                    if divided.startswith("world size")
                    else "choose other parallel sizes"
                )
                raise ValueError(f"{size} must divide the {divided}, got {divisor}; {advice}")

    def _layer_division(self, architecture: Architecture) -> tuple[int, int, str, str]:
        """Return how the layers are divided among the pipeline stages: divisor, number, and the names of both."""
        pp, last = self.pipeline_model_parallel_size, self.num_layers_in_last_pipeline_stage
        num_layers = architecture.num_hidden_layers
        if last is None:
            return pp * (self.virtual_pipeline_model_parallel_size or 1), num_layers, "pp x vpp", f"{num_layers} layers"
        if last >= num_layers:
            raise ValueError(
                f"num_layers_in_last_pipeline_stage must be below the {num_layers} layers of the model; got {last}"
            )
        before_last = num_layers - last
        return pp - 1, before_last, "pp - 1", f"{before_last} layers of the stages before the last"


def check_settings(model: ModelConfig, optimizer: OptimizerConfig | None) -> None:
    """Reject settings that the engine does not support.

    Raises:
        ValueError: a setting differs from its default; the message names it.
    """
    is_set = {
        "ModelConfig.dtype": model.dtype != "float32",
        "ModelConfig.compile_layers": model.compile_layers,
        "ModelConfig.frozen": bool(model.frozen),
        "ModelConfig.lora": model.lora is not None,
        "ModelConfig.output_router_logits": model.output_router_logits,
        "ModelConfig.trust_remote_code": model.trust_remote_code,
        "OptimizerConfig.param_groups": optimizer is not None and bool(optimizer.param_groups),
    }
    found = [name for name, differs in is_set.items() if differs]
    if found:
        raise ValueError(f"the Megatron engine does not support {', '.join(found)}; leave the default")
