"""Log-probabilities of k token ids for each token, of the most probable ones or of given ones."""

from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tidemill_engines.head.logits import LogitSlice


class TopK(Protocol):
    """Ids of k tokens for each of M tokens, and their logits, from slices of the vocabulary.

    Attributes:
        ids: [M, k] int64.
        logits: [M, k] float32 or float64, with bias; complete after all slices and `combine`.
    """

    ids: torch.Tensor
    logits: torch.Tensor

    def add(self, piece: LogitSlice) -> None:
        """Add a slice, whose logits remain unchanged."""
        ...

    def combine(self, group: dist.ProcessGroup) -> None:
        """Combine all ranks of a group, each of which has its own slices. Collective."""
        ...


class GivenIds:
    """A `TopK` of given ids."""

    def __init__(self, ids: torch.Tensor, dtype: torch.dtype) -> None:
        self.ids = ids.long()
        self.logits = torch.zeros_like(ids, dtype=dtype)

    def add(self, piece: LogitSlice) -> None:
        own, column = own_columns(self.ids, piece.first, piece.logits.shape[1])
        logits = piece.logits.gather(-1, column)
        if piece.bias is not None:
            logits += piece.bias[column]
        self.logits = torch.where(own, logits, self.logits)

    def combine(self, group: dist.ProcessGroup) -> None:
        dist.all_reduce(self.logits, group=group)  # exact: the other ranks have zeros


class MostProbable:
    """A `TopK` of the most probable ids, in descending order; k must not be larger than the vocabulary."""

    def __init__(self, num_tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self._k = k
        self.ids = torch.zeros(num_tokens, 0, dtype=torch.int64, device=device)
        self.logits = torch.zeros(num_tokens, 0, dtype=dtype, device=device)

    def add(self, piece: LogitSlice) -> None:
        logits = piece.logits if piece.bias is None else piece.logits + piece.bias
        largest, column = logits.topk(min(self._k, logits.shape[1]))
        self._keep_largest([self.logits, largest], [self.ids, column + piece.first])

    def combine(self, group: dist.ProcessGroup) -> None:
        missing = self._k - self.ids.shape[1]  # a rank may have fewer than k rows of the head
        logits, ids = F.pad(self.logits, (0, missing), value=-torch.inf), F.pad(self.ids, (0, missing))
        size = dist.get_world_size(group)
        all_logits, all_ids = ([torch.empty_like(own) for _ in range(size)] for own in (logits, ids))
        dist.all_gather(all_logits, logits, group=group)
        dist.all_gather(all_ids, ids, group=group)
        self._keep_largest(all_logits, all_ids)

    def _keep_largest(self, logits: list[torch.Tensor], ids: list[torch.Tensor]) -> None:
        all_logits, all_ids = torch.cat(logits, -1), torch.cat(ids, -1)
        self.logits, column = all_logits.topk(min(self._k, all_logits.shape[1]))
        self.ids = all_ids.gather(-1, column)


def own_columns(ids: torch.Tensor, first: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which ids [M, k] a slice has, and their columns [M, k] in it; an arbitrary column for the others."""
    column = ids - first
    return (column >= 0) & (column < num_columns), column.clamp(0, num_columns - 1)


def add_gradients(grad: torch.Tensor, first: int, ids: torch.Tensor, grad_logits: torch.Tensor) -> None:
    """Add the gradients [M, k] of the logits of distinct ids [M, k] to the gradient [M, C] of a slice's logits."""
    own, column = own_columns(ids, first, grad.shape[1])
    grad.scatter_add_(-1, column, torch.where(own, grad_logits, 0.0))
