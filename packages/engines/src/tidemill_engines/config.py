"""Configuration of model, optimizer, engine and checkpoints: frozen dataclasses."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, Self, get_args

Dtype = Literal["float32", "bfloat16", "float64"]
Device = Literal["auto", "cpu", "cuda"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
Recompute = Literal["full", "selective"]
NonFinite = Literal["skip", "raise"]


def check_choice(owner: object, field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{type(owner).__name__}.{field} must be one of {', '.join(choices)}; got {value!r}")


def check_range(owner: object, field: str, value: float, *, low: float, high: float = math.inf) -> None:
    """Check a bound; a field with an integer lower bound must be an integer."""
    _check_number(owner, field, value, whole=isinstance(low, int))
    if not low <= value <= high:
        bound = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{type(owner).__name__}.{field} must be {bound}; got {value!r}")


def check_positive(owner: object, field: str, value: float) -> None:
    _check_number(owner, field, value)
    if not value > 0:
        raise ValueError(f"{type(owner).__name__}.{field} must be above 0; got {value!r}")


def _check_number(owner: object, field: str, value: object, *, whole: bool = False) -> None:
    """Reject strings (YAML reads `1e-6` as one) and booleans, which are integers in Python."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        kind = "whole number" if whole else "number"
        raise TypeError(f"{type(owner).__name__}.{field} must be a {kind}; got {value!r}")


def check_names(owner: object, field: str, names: object) -> None:
    if isinstance(names, str):  # would be iterated letter by letter
        raise TypeError(f"{type(owner).__name__}.{field} must be a tuple of names; got {names!r}, write ({names!r},)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685) of peft.

    Attributes:
        rank: rank of the two factors.
        alpha: scale; the product of the factors is multiplied by alpha / rank.
        target_modules: last name components of the linear layers with an adapter; "all-linear" selects all linear
            layers except the head.
        dropout: dropout probability of the adapter input.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ("all-linear",)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "rank", self.rank, low=1)
        check_positive(self, "alpha", self.alpha)
        check_range(self, "dropout", self.dropout, low=0.0, high=1.0)
        check_names(self, "target_modules", self.target_modules)
        if not self.target_modules:
            raise ValueError("LoraConfig.target_modules must name at least one module")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A causal language model in Hugging Face format, or a vision-language model of `multi_modal.MODEL_TYPES`.

    Attributes:
        path: local folder with `config.json` and safetensors files.
        init_seed: seed to train from scratch: the weights are initialized by the model's own rule and no tensor of
            `path` is read. None loads the weights.
        dtype: dtype of the master weights, which the optimizer updates.
        attn_implementation: "varlen" (packed attention of this package) or a name of transformers, such as "sdpa" or
            "eager", with which every micro-batch of FSDP2 has one row. "varlen" requires a model whose attention
            transformers lets others replace (`_supports_attention_backend`).
        gradient_checkpointing: recompute each decoder layer in the backward pass instead of keeping its activations.
        recompute: part of a layer that is recomputed: "full" recomputes all of it; "selective" keeps the results of
            matrix products and attention, which are most of the work.
        compile_layers: `torch.compile` each decoder layer with dynamic shapes; the first steps take longer.
        frozen: `fnmatch` patterns of the names of parameters that are not trained, such as "model.embed_tokens.*".
        router_aux_loss_coef: coefficient of the load-balancing loss of a MoE model, which is added to every loss. It is
            computed per row and averaged over the trained rows, so it does not depend on micro-batches.
        output_router_logits: pass the router logits of a MoE model to losses and return them from `infer_batch`
            (`Outputs`). Both require that transformers records the router logits of the model.
        lora: train low-rank adapters and freeze all other weights; requires the extra `lora`.
        trust_remote_code: allow transformers to run code of `path`.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: an unknown dtype, or settings that exclude each other.
    """

    path: str
    init_seed: int | None = None
    dtype: Dtype = "float32"
    attn_implementation: str = "varlen"
    gradient_checkpointing: bool = False
    recompute: Recompute = "full"
    compile_layers: bool = False
    frozen: tuple[str, ...] = ()
    router_aux_loss_coef: float = 0.0
    output_router_logits: bool = False
    lora: LoraConfig | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_choice(self, "dtype", self.dtype, get_args(Dtype))
        check_choice(self, "recompute", self.recompute, get_args(Recompute))
        check_range(self, "router_aux_loss_coef", self.router_aux_loss_coef, low=0.0)
        check_names(self, "frozen", self.frozen)
        if self.lora is not None and self.frozen:
            raise ValueError("ModelConfig.lora freezes all of the model already; leave ModelConfig.frozen empty")
        if self.lora is not None and self.init_seed is not None:
            raise ValueError("ModelConfig.lora requires trained weights; leave ModelConfig.init_seed at None")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamGroup:
    """Optimizer settings of the parameters whose names match a pattern.

    Attributes:
        pattern: `fnmatch` pattern of the names, such as "*.bias".
        lr_ratio: factor of the scheduled learning rate.
        weight_decay: weight decay; None is that of parameters without a group, so 0 if they are exempt.
    """

    pattern: str
    lr_ratio: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        check_range(self, "lr_ratio", self.lr_ratio, low=0.0)
        if self.weight_decay is not None:
            check_range(self, "weight_decay", self.weight_decay, low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, gradient clipping and the learning-rate schedule.

    Attributes:
        lr: peak learning rate.
        betas: AdamW's decay rates of the first and second moment.
        eps: AdamW's epsilon.
        weight_decay: weight decay of all parameters that the next two fields do not exempt.
        decay_norms_and_biases: False exempts parameters with fewer than two dimensions and parameters named `bias`.
        param_groups: settings by parameter name; the first matching pattern applies.
        clip_grad: maximum global gradient norm, above 0; `inf` disables clipping.
        nonfinite: policy for a gradient with an infinite or NaN element: "skip" skips the step and counts it; "raise"
            raises a RuntimeError on every rank that names a rank and a parameter. Neither changes weights or optimizer.
        lr_scheduler: learning-rate schedule after the warm-up.
        lr_warmup_steps: steps of linear warm-up; the first step uses lr / lr_warmup_steps.
        total_steps: last step of the schedule; ignored by "constant".
        lr_decay_steps: number of last steps of "wsd" (warm-up, stable, decay), in which the rate decays linearly.
        min_lr_ratio: fraction of `lr` at the end of the schedule; ignored by "constant".

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or a decaying schedule has no `total_steps`.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_norms_and_biases: bool = True
    param_groups: tuple[ParamGroup, ...] = ()
    clip_grad: float = 1.0
    nonfinite: NonFinite = "skip"
    lr_scheduler: Schedule = "constant"
    lr_warmup_steps: int = 0
    total_steps: int | None = None
    lr_decay_steps: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_choice(self, "lr_scheduler", self.lr_scheduler, get_args(Schedule))
        check_choice(self, "nonfinite", self.nonfinite, get_args(NonFinite))
        check_range(self, "lr", self.lr, low=0.0)
        check_range(self, "eps", self.eps, low=0.0)
        check_range(self, "weight_decay", self.weight_decay, low=0.0)
        check_positive(self, "clip_grad", self.clip_grad)
        check_range(self, "lr_warmup_steps", self.lr_warmup_steps, low=0)
        check_range(self, "min_lr_ratio", self.min_lr_ratio, low=0.0, high=1.0)
        for beta in self.betas:
            check_range(self, "betas", beta, low=0.0, high=1.0)
        if len(self.betas) != 2 or 1.0 in self.betas:
            raise ValueError(f"OptimizerConfig.betas must be two numbers below 1; got {self.betas!r}")
        if self.lr_scheduler == "constant":
            return
        if self.total_steps is None or self.total_steps <= self.lr_warmup_steps:
            raise ValueError(
                f"OptimizerConfig.lr_scheduler {self.lr_scheduler!r} requires total_steps above lr_warmup_steps "
                f"({self.lr_warmup_steps}); got {self.total_steps!r}"
            )
        if self.lr_scheduler == "wsd":
            longest = self.total_steps - self.lr_warmup_steps
            if self.lr_decay_steps is None or not 0 < self.lr_decay_steps <= longest:
                raise ValueError(
                    "OptimizerConfig.lr_scheduler 'wsd' requires lr_decay_steps between 1 and total_steps - "
                    f"lr_warmup_steps ({longest}); got {self.lr_decay_steps!r}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings that all engines share. Each backend has a subclass: `FSDP2Config`, `MegatronConfig`.

    Attributes:
        backend: name of the backend; each subclass sets it.
        device: device type of the engine; "auto" selects CUDA if it is available.
        param_dtype: dtype of the forward and backward pass.
        param_offload: keep the parameters on the CPU except within `train_mode`, `eval_mode` and methods that read or
            write weights.
        grad_offload: keep the gradients on the CPU except within `train_mode`.
        optimizer_offload: keep the optimizer state on the CPU except within `optimizer_step`.
        peak_tflops: peak TFLOP/s of one device in `param_dtype`, for `BaseEngine.performance`; None uses the known
            value of common GPUs.
        max_token_len_per_gpu: maximum tokens (prompt and response, without padding) of a micro-batch on each of the
            ranks that share the tokens of a row; a row of more than `max_tokens` is rejected.
        micro_batch_size_per_gpu: rows per micro-batch; rejected if they exceed `max_token_len_per_gpu`. None makes
            micro-batches of about the same work, except with FSDP2 and another `ModelConfig.attn_implementation` than
            "varlen".
        timeout_s: timeout of collectives, in seconds.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range.
    """

    backend: str
    device: Device = "auto"
    param_dtype: Dtype = "float32"
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    peak_tflops: float | None = None
    max_token_len_per_gpu: int = 16384
    micro_batch_size_per_gpu: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_choice(self, "device", self.device, get_args(Device))
        check_choice(self, "param_dtype", self.param_dtype, get_args(Dtype))
        check_range(self, "max_token_len_per_gpu", self.max_token_len_per_gpu, low=1)
        if self.micro_batch_size_per_gpu is not None:
            check_range(self, "micro_batch_size_per_gpu", self.micro_batch_size_per_gpu, low=1)
        if self.peak_tflops is not None:
            check_positive(self, "peak_tflops", self.peak_tflops)
        check_positive(self, "timeout_s", self.timeout_s)

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that work on the same rows."""
        return 1

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a micro-batch, and so of a row."""
        return self.max_token_len_per_gpu * self.ranks_per_row

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make training faster if the processes of all ranks start with them."""
        return {}

    @property
    def replays_routing(self) -> bool:
        """Whether the engine accepts and returns the column `routed_experts`."""
        return False

    def with_router_replay(self) -> Self:
        """Return the same configuration with router replay.

        Raises:
            ValueError: the backend does not support router replay.
        """
        raise ValueError(f"{type(self).__name__} does not support router replay; use MegatronConfig")

    def weight_dtype(self, model: ModelConfig) -> Dtype:
        """Return the dtype of the weights that the engine exports if no other dtype is requested."""
        return model.dtype

    def world_size_divisors(self) -> dict[str, int]:
        """Return the sizes that must divide the world size, by the name of their fields."""
        return {}

    def check(self, model: ModelConfig, optimizer: OptimizerConfig | None, world_size: int) -> None:
        """Check that the engine can train the model at `model.path` on `world_size` ranks. Reads `config.json` only.

        Raises:
            ValueError: a parallel size does not divide a size of the model or the world size, or the engine
                does not support a setting.
        """
        self.check_world_size(world_size)

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if the ranks cannot be divided as configured."""
        for name, size in self.world_size_divisors().items():
            if world_size % size:
                raise ValueError(f"{type(self).__name__}.{name} must divide the world size {world_size}; got {size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """How an engine saves its checkpoints.

    Attributes:
        asynchronous: copy the state to the CPU and write it in the background, if the memory of every host has room for
            the copies of its ranks. The checkpoint appears under its name when it is complete; `finish_checkpoint`, the
            next save and `close` wait for it and raise its error.
        keep_last: number of complete checkpoints to keep in the parent folder; the oldest are removed after a new one
            is on the disk. None keeps all.

    Raises:
        TypeError: `keep_last` is not an integer.
        ValueError: `keep_last` is below 1.
    """

    asynchronous: bool = False
    keep_last: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None:
            check_range(self, "keep_last", self.keep_last, low=1)
