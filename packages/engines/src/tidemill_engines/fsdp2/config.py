"""Configuration of the FSDP2 engine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tidemill_engines.config import (
    Dtype,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    check_choice,
    check_names,
    check_range,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDP2Config(EngineConfig):
    """Settings of the FSDP2 engine, in addition to those of `EngineConfig`.

    Master weights keep `ModelConfig.dtype`; `param_dtype` is the dtype of the forward and backward pass only.

    Attributes:
        reduce_dtype: dtype of the gradient reduction over ranks.
        fsdp_size: number of ranks that share one copy of the weights; -1 uses all ranks. A smaller size replicates the
            sharded model (HSDP) and must divide the world size.
        reshard_after_forward: free the gathered weights after each layer (ZeRO-3). False keeps them, and the gradients
            of earlier micro-batches, gathered until the step ends (ZeRO-2): less communication, more memory.
        wrap_classes: names of the module classes that are sharded as units; empty uses the classes that transformers
            lists for the model (`_no_split_modules`).
        offload_policy: keep parameters, gradients and optimizer state on the CPU at all times, copy the parameters of
            one layer at a time to the GPU, and run the optimizer step on the CPU: least memory, slowest.
        ulysses_sequence_parallel_size: number of consecutive ranks that share the tokens of the same rows; all of them
            receive those rows. Must divide the world size and the number of attention heads.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or two settings exclude each other.
    """

    backend: Literal["fsdp2"] = "fsdp2"
    reduce_dtype: Dtype = "float32"
    fsdp_size: int = -1
    reshard_after_forward: bool = True
    wrap_classes: tuple[str, ...] = ()
    offload_policy: bool = False
    ulysses_sequence_parallel_size: int = 1

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check_choice(self, "reduce_dtype", self.reduce_dtype, get_args(Dtype))
        check_names(self, "wrap_classes", self.wrap_classes)
        check_range(self, "ulysses_sequence_parallel_size", self.ulysses_sequence_parallel_size, low=1)
        if self.fsdp_size != -1:
            check_range(self, "fsdp_size", self.fsdp_size, low=1)
        if self.offload_policy and (self.param_offload or self.grad_offload or self.optimizer_offload):
            raise ValueError(
                "FSDP2Config.offload_policy keeps parameters, gradients and optimizer state on the CPU already; leave "
                "param_offload, grad_offload and optimizer_offload at False"
            )

    @property
    def ranks_per_row(self) -> int:
        return self.ulysses_sequence_parallel_size

    def world_size_divisors(self) -> dict[str, int]:
        sizes = {"ulysses_sequence_parallel_size": self.ulysses_sequence_parallel_size}
        return sizes if self.fsdp_size == -1 else sizes | {"fsdp_size": self.fsdp_size}

    def check(self, model: ModelConfig, optimizer: OptimizerConfig | None, world_size: int) -> None:
        self.check_world_size(world_size)
        fields = json.loads((Path(model.path) / "config.json").read_bytes())
        num_heads = fields.get("num_attention_heads")  # absent in configs with sections, such as vision
        if num_heads is not None:
            self.check_heads(num_heads)

    def check_heads(self, num_heads: int) -> None:
        """Raise ValueError if the attention heads cannot be divided among the ranks that share rows."""
        size = self.ulysses_sequence_parallel_size
        if num_heads % size:
            raise ValueError(
                f"FSDP2Config.ulysses_sequence_parallel_size must divide the {num_heads} attention heads of the model; "
                f"got {size}"
            )
