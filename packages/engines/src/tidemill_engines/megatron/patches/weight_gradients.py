"""Weight gradients accumulated in float32 by the matrix product that computes them.

Upstream does:
    `gradient_accumulation_fusion` of its linear layers calls Apex's kernel `fused_weight_gradient_mlp_cuda`
    (`tensor_parallel/layers.py:569`).

Problem:
    Slow without Apex: the gradient of each micro-batch is written in bfloat16, and another kernel adds it to the
    float32 buffer. That also rounds it to bfloat16. torch's `addmm` can accumulate bfloat16 products into float32.

Seen in:
    megatron-core 0.16.1

Remove when:
    Megatron's linear layers accumulate into `main_grad` without Apex.
"""

import torch
from torch import nn

from tidemill_engines.megatron.patches.monkeypatch import Attributes, Monkeypatch


class WeightGradients:
    """Stand-in for Apex's module `fused_weight_gradient_mlp_cuda`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        """Add the transpose of `grad` [n, N] times `x` [n, K] to `main_grad` [N, K].

        Args:
            x, grad: bfloat16 or float16, on a CUDA device.
            main_grad: float32.
        """
        torch.addmm(main_grad, grad.t(), x, out_dtype=torch.float32, out=main_grad)


def accumulate_in_products(model: nn.Module) -> None:
    """Make Megatron's linear layers use `WeightGradients`; their weights are half precision and have a `main_grad`."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.gradient_accumulation_fusion = True


def _apply(attributes: Attributes) -> None:
    from megatron.core.tensor_parallel import layers

    attributes.replace(layers, "fused_weight_gradient_mlp_cuda", WeightGradients)


fused_weight_gradients = Monkeypatch(_apply)
"""Context in which linear layers with `gradient_accumulation_fusion` call `WeightGradients`."""
