"""How the Megatron engine divides a model among ranks."""

from dataclasses import dataclass
from typing import Literal, get_args

from tidemill_engines.config import (
    Device,
    Dtype,
    ModelConfig,
    OptimizerConfig,
    check_choice,
    check_names,
    check_positive,
    check_range,
)
from tidemill_engines.megatron.architecture import Architecture

_RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Sizes of the parallel groups, by Megatron's names. What remains of the world size is data parallelism.

    Attributes:
        virtual_pipeline_model_parallel_size: model chunks of each pipeline stage (interleaved schedule); None: one.
        num_layers_in_last_pipeline_stage: of that which has the head, too, and may have fewer layers for it; None: as
            many as others.
        expert_tensor_parallel_size: of the experts' matrices; None: as `tensor_model_parallel_size`.
        moe_token_dispatcher_type: how tokens reach their experts: "alltoall", or "allgather" for all to all ranks.
        sequence_parallel: norms and dropout work on a part of the tokens on each tensor-parallel rank.

    Raises:
        ValueError: a size below 1, or sequence or virtual pipeline parallelism without the parallelism that it is of.
        TypeError: a size that is no whole number.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
            *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
            "num_layers_in_last_pipeline_stage",
        ):
            if getattr(self, name) is not None:
                check_range(self, name, getattr(self, name), low=1)
        check_choice(self, "moe_token_dispatcher_type", self.moe_token_dispatcher_type, ("alltoall", "allgather"))
        if self.moe_token_dispatcher_type == "allgather" and self.pipeline_model_parallel_size > 1:
            raise ValueError(
                f"{type(self).__name__}.moe_token_dispatcher_type='allgather' needs stages that know each other's "
                "lengths, which packed rows do not have; use 'alltoall' with pipeline_model_parallel_size above 1"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(f"{type(self).__name__}.sequence_parallel needs tensor_model_parallel_size above 1")
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                f"{type(self).__name__}.virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 1"
            )
        if self.num_layers_in_last_pipeline_stage is not None and (
            self.pipeline_model_parallel_size == 1 or self.virtual_pipeline_model_parallel_size is not None
        ):
            raise ValueError(
                f"{type(self).__name__}.num_layers_in_last_pipeline_stage needs pipeline_model_parallel_size above 1 "
                "and no virtual_pipeline_model_parallel_size"
            )

    @property
    def expert_tp(self) -> int:
        """The tensor-parallel size of the experts."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def ranks_per_row(self) -> int:
        """Ranks that work on the same rows."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def check(self, architecture: Architecture, world_size: int) -> None:
        """Checks that a model and a number of ranks can be divided so; nothing is communicated.

        Raises:
            ValueError: they cannot; it says what has to divide what.
        """
        a = architecture
        tp, pp, cp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size
        last = self.num_layers_in_last_pipeline_stage
        chunks = pp * (self.virtual_pipeline_model_parallel_size or 1) if last is None else pp - 1
        if last is not None and last >= a.num_hidden_layers:
            raise ValueError(f"num_layers_in_last_pipeline_stage is {last}, the model has {a.num_hidden_layers} layers")
        ep, etp = self.expert_model_parallel_size, self.expert_tp
        if ep > 1 and not a.num_experts:
            raise ValueError(f"expert_model_parallel_size is {ep}, but a {a.model_type} model has no experts")
        if a.num_experts and tp > 1 and not self.sequence_parallel:
            raise ValueError(
                "a mixture of experts with tensor_model_parallel_size above 1 needs sequence_parallel=True: Megatron "
                "trains no other"
            )
        for divisor, number, what, of in (
            (tp * pp * cp, world_size, "tp x pp x cp", "ranks"),
            (tp, a.num_attention_heads, "tensor_model_parallel_size", "attention heads"),
            (tp, a.num_key_value_heads, "tensor_model_parallel_size", "key and value heads"),
            (
                tp if a.num_dense_layers or not a.num_experts else 1,
                a.intermediate_size,
                "tensor_model_parallel_size",
                "intermediate_size",
            ),
            (tp, a.shared_intermediate_size, "tensor_model_parallel_size", "intermediate size of the shared experts"),
            (
                chunks,
                a.num_hidden_layers - (last or 0),
                "pp x vpp" if last is None else "pp - 1",
                "layers" if last is None else "layers of other stages than the last",
            ),
            (etp * ep * pp, world_size, "etp x ep x pp", "ranks"),
            (ep if a.num_experts else 1, a.num_experts, "expert_model_parallel_size", "experts"),
            (
                etp if a.num_experts else 1,
                a.moe_intermediate_size,
                "expert_tensor_parallel_size",
                "moe_intermediate_size",
            ),
        ):
            if number % divisor:
                raise ValueError(f"{what} = {divisor} does not divide the {number} {of}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronConfig(ParallelConfig):
    """How the Megatron engine runs, and how it divides the model (see `ParallelConfig`).

    Attributes:
        backend: tells configurations of different engines apart.
        device: "auto" takes CUDA where it is usable.
        param_dtype: of parameters, forward and backward. Of bfloat16 parameters the optimizer keeps float32 masters,
            which are in checkpoints; what is exported or handed out are the parameters, cast to float32 or not.
        transformer_impl: what layers are made of, by Megatron's name: "transformer_engine", which has to be installed
            and is for CUDA; "local", Megatron's own modules and this package's; or "auto", Transformer Engine where it
            can be used and parameters are bfloat16 (it multiplies float32 in TF32), but not for latent attention.
        use_distributed_optimizer: divide the optimizer's state among data-parallel ranks.
        overlap_grad_reduce: reduce gradients while the backward goes on.
        overlap_param_gather: gather the weights that other ranks have updated while the next forward goes on.
        recompute_modules: what `ModelConfig.recompute="selective"` computes again in the backward, by Megatron's names:
            "layernorm", "mlp", "core_attn", and of a mixture of experts "moe".
        fuse_elementwise: on CUDA make few kernels of activation and rotary embedding, with torch.compile.
        param_offload: keep weights on the CPU except while a context needs them: `train_mode`, `eval_mode`, or a method
            that reads or writes weights.
        grad_offload: likewise for gradients, which `train_mode` needs.
        optimizer_offload: likewise for the optimizer's state, which `train_mode` needs.
        peak_tflops: of one device in `param_dtype`, for `performance`; None knows those of common GPUs.
        max_token_len_per_gpu: tokens (prompt and response) of a micro-batch on each rank, padding not counted; a row
            may have as many on each of the context-parallel ranks.
        micro_batch_size_per_gpu: rows per micro-batch; None forms micro-batches by tokens.
        router_replay: of a mixture of experts: `infer_batch` also brings the column `routed_experts`, int32
            [B, j, L, K]: the experts that each token of `input_ids` was sent to in each layer. Where a batch has that
            column (that of `infer_batch`, or from the rollout), tokens are sent there, in training too; -1 leaves a
            token to the router. Without it, a batch with that column is refused.
        seed: of Megatron's random states.
        timeout_s: how long a collective may wait for a peer.

    Raises:
        ValueError: a value out of its range.
        TypeError: a number that is none, or names that are one text.
    """

    backend: Literal["megatron"] = "megatron"
    device: Device = "auto"
    param_dtype: Dtype = "float32"
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute_modules: tuple[str, ...] = ("layernorm", "mlp")
    fuse_elementwise: bool = True
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    peak_tflops: float | None = None
    max_token_len_per_gpu: int = 16384
    micro_batch_size_per_gpu: int | None = None
    router_replay: bool = False
    seed: int = 1
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        ParallelConfig.__post_init__(self)
        check_choice(self, "device", self.device, get_args(Device))
        check_choice(self, "param_dtype", self.param_dtype, ("float32", "bfloat16"))
        check_choice(self, "transformer_impl", self.transformer_impl, ("auto", "local", "transformer_engine"))
        check_names(self, "recompute_modules", self.recompute_modules)
        for module in self.recompute_modules:
            check_choice(self, "recompute_modules", module, _RECOMPUTED)
        check_range(self, "max_token_len_per_gpu", self.max_token_len_per_gpu, low=1)
        if self.micro_batch_size_per_gpu is not None:
            check_range(self, "micro_batch_size_per_gpu", self.micro_batch_size_per_gpu, low=1)
        if self.peak_tflops is not None:
            check_positive(self, "peak_tflops", self.peak_tflops)
        check_range(self, "seed", self.seed, low=0)
        check_positive(self, "timeout_s", self.timeout_s)
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "MegatronConfig.overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce"
            )

    def recomputed(self, model: ModelConfig) -> tuple[str, ...]:
        """What the backward computes again: modules by Megatron's names, ("full",) for whole layers, or nothing."""
        if not model.gradient_checkpointing:
            return ()
        return self.recompute_modules if model.recompute == "selective" else ("full",)


def check_settings(model: ModelConfig, optimizer: OptimizerConfig | None) -> None:
    """Refuses what the engine would leave undone in silence.

    Raises:
        ValueError: a setting that it does not have, named.
    """
    unused = {
        "ModelConfig.dtype": model.dtype != "float32",
        "ModelConfig.compile_layers": model.compile_layers,
        "ModelConfig.frozen": bool(model.frozen),
        "ModelConfig.lora": model.lora is not None,
        "ModelConfig.output_router_logits": model.output_router_logits,
        "ModelConfig.trust_remote_code": model.trust_remote_code,
        "OptimizerConfig.param_groups": optimizer is not None and bool(optimizer.param_groups),
    }
    found = [name for name, is_set in unused.items() if is_set]
    if found:
        raise ValueError(f"the Megatron engine has no {', '.join(found)}; leave it as it is by default")
