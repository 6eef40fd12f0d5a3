"""What an engine is made from: frozen dataclasses, each owned by the part that reads it."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["float32", "bfloat16", "float64"]
Device = Literal["auto", "cpu", "cuda"]
Schedule = Literal["constant", "linear", "cosine"]


def _check_choice(owner: object, field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{type(owner).__name__}.{field} must be one of {', '.join(choices)}; got {value!r}")


def _check_range(owner: object, field: str, value: float, *, low: float, high: float = math.inf) -> None:
    if not low <= value <= high:
        bound = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{type(owner).__name__}.{field} must be {bound}; got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A causal language model in Hugging Face format.

    Attributes:
        path: a local folder with `config.json` and safetensors.
        dtype: of the master weights, which the optimizer updates.
        attn_implementation: "varlen" (packed attention of this package) or a name known to transformers, such as
            "sdpa", which builds an [N, N] mask over the packed rows.
        gradient_checkpointing: recompute each decoder layer in the backward pass.
        trust_remote_code: let transformers run code found in `path`.

    Raises:
        ValueError: an unknown dtype.
    """

    path: str
    dtype: Dtype = "float32"
    attn_implementation: str = "varlen"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _check_choice(self, "dtype", self.dtype, get_args(Dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, gradient clipping and the learning-rate schedule.

    Attributes:
        lr: the peak learning rate.
        clip_grad: the largest global gradient norm; `inf` switches clipping off.
        lr_warmup_steps: steps of linear warm-up; the first step already has lr / lr_warmup_steps.
        total_steps: where "linear" and "cosine" end; "constant" ignores it.
        min_lr_ratio: the share of `lr` that "linear" and "cosine" end with.

    Raises:
        ValueError: a value out of its range, or a decaying schedule without `total_steps`.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    lr_scheduler: Schedule = "constant"
    lr_warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        _check_choice(self, "lr_scheduler", self.lr_scheduler, get_args(Schedule))
        _check_range(self, "lr", self.lr, low=0.0)
        _check_range(self, "eps", self.eps, low=0.0)
        _check_range(self, "weight_decay", self.weight_decay, low=0.0)
        _check_range(self, "clip_grad", self.clip_grad, low=0.0)
        _check_range(self, "lr_warmup_steps", self.lr_warmup_steps, low=0)
        _check_range(self, "min_lr_ratio", self.min_lr_ratio, low=0.0, high=1.0)
        for beta in self.betas:
            _check_range(self, "betas", beta, low=0.0, high=1.0)
        if self.lr_scheduler == "constant":
            return
        if self.total_steps is None or self.total_steps <= self.lr_warmup_steps:
            raise ValueError(
                f"OptimizerConfig.lr_scheduler {self.lr_scheduler!r} needs total_steps above lr_warmup_steps "
                f"({self.lr_warmup_steps}); got {self.total_steps!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the FSDP2 engine runs.

    Attributes:
        device: "auto" takes CUDA where it is usable.
        param_dtype: of forward and backward; the master weights keep `ModelConfig.dtype`.
        reduce_dtype: of the gradient reduction over ranks.
        fsdp_size: ranks that share one copy of the weights; -1 means all of them. A smaller number replicates the
            sharded model (HSDP) and must divide the world size.
        reshard_after_forward: free the gathered weights after each layer (ZeRO-3). False keeps them, and the gradients
            of earlier micro-batches, gathered until the step ends (ZeRO-2): less communication, more memory.
        ulysses_sequence_parallel_size: ranks that share the tokens of the same rows, and all of which are given those
            rows; must divide the world size and the attention heads.
        max_token_len_per_gpu: tokens (prompt and response) that a micro-batch may hold; a longer row is refused.
        micro_batch_size_per_gpu: rows per micro-batch; None forms micro-batches by tokens.
        timeout_s: how long a collective may wait for a peer.

    Raises:
        ValueError: a value out of its range.
    """

    device: Device = "auto"
    param_dtype: Dtype = "float32"
    reduce_dtype: Dtype = "float32"
    fsdp_size: int = -1
    reshard_after_forward: bool = True
    ulysses_sequence_parallel_size: int = 1
    max_token_len_per_gpu: int = 16384
    micro_batch_size_per_gpu: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _check_choice(self, "device", self.device, get_args(Device))
        _check_choice(self, "param_dtype", self.param_dtype, get_args(Dtype))
        _check_choice(self, "reduce_dtype", self.reduce_dtype, get_args(Dtype))
        _check_range(self, "max_token_len_per_gpu", self.max_token_len_per_gpu, low=1)
        _check_range(self, "ulysses_sequence_parallel_size", self.ulysses_sequence_parallel_size, low=1)
        if self.micro_batch_size_per_gpu is not None:
            _check_range(self, "micro_batch_size_per_gpu", self.micro_batch_size_per_gpu, low=1)
        if self.fsdp_size != -1:
            _check_range(self, "fsdp_size", self.fsdp_size, low=1)
        if not self.timeout_s > 0:
            raise ValueError(f"EngineConfig.timeout_s must be above 0 seconds; got {self.timeout_s!r}")
