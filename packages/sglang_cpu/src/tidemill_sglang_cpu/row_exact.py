"""Matrix products whose rows do not depend on the number of rows, for deterministic inference."""

import torch

# BLAS libraries use other kernels for few rows and for the remainder after full register tiles.
_ROW_ALIGNMENT = 16

_library: torch.library.Library | None = None


def enable_row_exact_matmul() -> None:
    """Make `torch.mm` and `torch.addmm` on the CPU pad their rows, for the whole process, and use one thread.

    Corresponds to SGLang's enable_batch_invariant_mode, which uses Triton kernels on CUDA. One thread is required,
    because the split of a product or an SDPA call between threads changes the order of its sums.
    """
    global _library
    if _library is not None:
        return
    torch.set_num_threads(1)
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("mm", mm, "CPU")
    _library.impl("addmm", addmm, "CPU")


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product [N, K] @ [K, M] -> [N, M]; the bits of a row are independent of N."""
    num_rows = a.shape[0]
    padding = -num_rows % _ROW_ALIGNMENT
    if padding:
        a = torch.constant_pad_nd(a, (0, 0, 0, padding))
    out = a.new_empty(a.shape[0], b.shape[1])
    torch.mm(a, b, out=out)  # the out variant is another operator, so this does not recurse
    return out[:num_rows]


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """Return beta * bias + alpha * mm(a, b)."""
    out = mm(a, b)
    if alpha != 1:
        out = out * alpha
    return out + (bias if beta == 1 else bias * beta)
