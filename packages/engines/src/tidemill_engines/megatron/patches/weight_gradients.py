"""Gradients of weights, added in float32 to those of earlier micro-batches by the product that makes them."""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn


class WeightGradients:
    """In the place of Apex's `fused_weight_gradient_mlp_cuda`: torch's product can add bfloat16 to float32, too."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        """Adds the transpose of `grad` [n, N] times `x` [n, K] to `main_grad` [N, K].

        Args:
            x, grad: in bfloat16 or float16, on a CUDA device.
            main_grad: in float32.
        """
        torch.addmm(main_grad, grad.t(), x, out_dtype=torch.float32, out=main_grad)


def add_in_products(model: nn.Module) -> None:
    """Lets Megatron's linear layers use it; their weights are in half precision and have a `main_grad`."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.gradient_accumulation_fusion = True
