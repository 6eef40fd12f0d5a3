"""Matrix products whose rows do not depend on how many rows there are, for deterministic inference."""

import torch

# BLAS libraries take other kernels for a few rows and for the rows left over from full register tiles.
_ROW_ALIGNMENT = 16

_library: torch.library.Library | None = None


def enable_row_exact_matmul() -> None:
    """Makes `torch.mm` and `torch.addmm` on the CPU pad their rows, for the whole process. Runs on one thread.

    What SGLang's enable_batch_invariant_mode does for CUDA with Triton kernels. One thread, because how a product or
    an SDPA call is split between threads changes the order of its sums.
    """
    global _library
    if _library is not None:
        return
    torch.set_num_threads(1)
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("mm", mm, "CPU")
    _library.impl("addmm", addmm, "CPU")


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[N, K] @ [K, M] -> [N, M], with the bits of a row independent of N."""
    num_rows = a.shape[0]
    padding = -num_rows % _ROW_ALIGNMENT
    if padding:
        a = torch.constant_pad_nd(a, (0, 0, 0, padding))
    out = a.new_empty(a.shape[0], b.shape[1])
    torch.mm(a, b, out=out)  # the out variant is another operator, so this does not come back here
    return out[:num_rows]


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """beta * bias + alpha * (a @ b), as `mm`."""
    out = mm(a, b)
    if alpha != 1:
        out = out * alpha
    return out + (bias if beta == 1 else bias * beta)
