"""Online softmax over slices of the vocabulary: statistics per token, and the gradient of a slice's logits.

On CUDA the passes over float32 logits are Triton kernels (`head.kernels`); on the CPU and in float64 they use torch.
"""

import torch
import torch.distributed as dist

from tidemill_engines.head.logits import LogitRule, LogitSlice
from tidemill_engines.head.top_k import own_columns


class SoftmaxParts:
    """Running statistics of the slices so far. Slices, also those of other ranks, can be added in any order.

    Attributes:
        values: [4, M] float32 or float64. Rows: the largest z; the sum of exp(z - largest); the sum of
            exp(z - largest) (z - largest), for the entropy; the z of the label, 0 if no slice contains it.
    """

    def __init__(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(4, num_tokens, dtype=dtype, device=device)
        self.values[0] = torch.finfo(dtype).min  # not -inf: -inf - (-inf) is NaN

    def add(self, piece: LogitSlice, labels: torch.Tensor, rule: LogitRule) -> None:
        """Add a slice; labels: [M] int64, token ids of the whole vocabulary."""
        if _has_kernels(piece.logits):
            from tidemill_engines.head.kernels import add_slice

            add_slice(self.values, piece, labels, rule)
            return
        z, _ = softened(piece, rule)
        before, total, moment, label = self.values
        own, column = own_columns(labels.unsqueeze(-1), piece.first, z.shape[1])
        label.copy_(torch.where(own, z.gather(-1, column), label.unsqueeze(-1)).squeeze(-1))
        largest = torch.maximum(before, z.amax(-1))
        z.sub_(largest.unsqueeze(-1))
        exp = z.exp()
        shift = before - largest
        moment.add_(shift * total).mul_(shift.exp()).add_(torch.linalg.vecdot(exp, z))
        total.mul_(shift.exp()).add_(exp.sum(-1))
        before.copy_(largest)

    def combine(self, group: dist.ProcessGroup) -> None:
        """Combine the statistics of all ranks of a group, each of which has its own slices. Collective."""
        before, total, moment, _ = self.values
        largest = before.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shift = before - largest
        moment.add_(shift * total).mul_(shift.exp())
        total.mul_(shift.exp())
        dist.all_reduce(self.values[1:], group=group)
        before.copy_(largest)

    def log_probs(self) -> torch.Tensor:
        """Return log p(label), [M]."""
        # label - logsumexp would lose precision if logits are large and the model is nearly certain.
        return self.values[3] - self.values[0] - self.values[1].log()

    def statistics(self) -> torch.Tensor:
        """Return [3, M]: the largest z, the logarithm of the sum, and the entropy in nats."""
        largest, total, moment, _ = self.values
        return torch.stack([largest, total.log(), total.log() - moment / total])


def logit_gradients(
    piece: LogitSlice,
    labels: torch.Tensor,
    statistics: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_total: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    rule: LogitRule,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient [M, C] of the logits x of a slice, in `dtype`; in their memory if the dtype is the same.

    For the argument z of softmax, d log p(y) / dz_j = [j = y] - p_j; for the entropy S, dS / dz_j = -p_j (log p_j + S).

    Args:
        statistics: `SoftmaxParts.statistics` of all slices.
        grad_log_probs: [M], gradient of the log-probability of the label.
        grad_total: [M], `grad_log_probs` plus the gradients of other log-probabilities of the same distribution, whose
            terms [j = y] the caller adds.
        grad_entropy: [M], gradient of the entropy, or None.
    """
    if _has_kernels(piece.logits):
        from tidemill_engines.head.kernels import slice_gradients

        return slice_gradients(piece, labels, statistics, grad_log_probs, grad_total, grad_entropy, rule, dtype)
    z, slope = softened(piece, rule)
    largest, log_total, entropy = statistics.unsqueeze(-1)
    log_p = z.sub_(largest).sub_(log_total)
    p = log_p.exp()
    if grad_entropy is None:
        grad = p.mul_(-grad_total.unsqueeze(-1))
    else:
        weights = log_p.add_(entropy).mul_(grad_entropy.unsqueeze(-1)).add_(grad_total.unsqueeze(-1))
        grad = weights.mul_(p).neg_()
    own, column = own_columns(labels.unsqueeze(-1), piece.first, z.shape[1])
    grad.scatter_add_(-1, column, torch.where(own, grad_log_probs.unsqueeze(-1), 0.0))
    return grad.mul_(slope).to(dtype)


def _has_kernels(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32


def softened(piece: LogitSlice, rule: LogitRule) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return z [M, C], in the memory of the logits, and dz / dx as [M, C] or a number."""
    x = piece.logits
    if piece.bias is not None:
        x.add_(piece.bias)
    if rule.softcap is None:
        return x if rule.outer == 1.0 else x.mul_(rule.outer), rule.outer
    bounded = x.mul_(rule.inner).tanh_()
    slope = bounded.square().neg_().add_(1.0).mul_(rule.inner * rule.outer)
    return bounded.mul_(rule.outer), slope
