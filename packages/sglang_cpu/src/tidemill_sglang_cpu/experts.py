"""What SGLang's mixtures of experts need besides on a CPU."""

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
from sglang.srt.state_capturer.base import BaseHostCache


def register_experts() -> None:
    """Gives experts SGLang's own plain PyTorch, through its registry. Idempotent.

    It asks platforms outside of it for a `forward_native`, which experts lack; their `forward_cpu` is that.
    """
    MultiPlatformOp.register_oot_forward(UnquantizedFusedMoEMethod, UnquantizedFusedMoEMethod.forward_cpu, "native")


class PageableHostCache(BaseHostCache):
    """Where the experts of cached tokens are kept for `return_routed_experts`, in memory that is not pinned."""

    def __init__(self, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
        self.buffer = torch.zeros(num_tokens, num_layers, topk_size, dtype=torch.int32)
        self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name
