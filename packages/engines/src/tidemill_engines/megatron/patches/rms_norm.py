"""RMS norm for sequence parallelism.

Upstream does:
    Without Transformer Engine and Apex, `WrappedTorchNorm` refuses sequence parallelism (`torch_norm.py:34`).

Problem:
    Sequence parallelism is an AssertionError. It needs the weight marked `sequence_parallel`: each rank has the
    gradient of its own tokens only, and Megatron sums the gradients of marked weights.

Seen in:
    megatron-core 0.16.1

Remove when:
    `WrappedTorchNorm` marks its weight.
"""

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMS norm, also with sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[assignment]
