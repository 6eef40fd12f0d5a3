"""MoE support that SGLang lacks on CPUs."""

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
from sglang.srt.state_capturer.base import BaseHostCache


def register_experts() -> None:
    """Register SGLang's PyTorch implementation of experts for out-of-tree platforms. Idempotent.

    SGLang calls `forward_native` on such platforms, which its experts lack; `forward_cpu` is the equivalent.
    """
    MultiPlatformOp.register_oot_forward(UnquantizedFusedMoEMethod, UnquantizedFusedMoEMethod.forward_cpu, "native")


class PageableHostCache(BaseHostCache):
    """Cache of the routed experts of cached tokens, for `return_routed_experts`, in memory that is not pinned."""

    def __init__(self, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
        self.buffer = torch.zeros(num_tokens, num_layers, topk_size, dtype=torch.int32)
        self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name
