"""Routing of the tokens of one micro-batch: given or recorded experts, counts, and the balance loss."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tidemill_engines.megatron.parallel.stage_sums import StageSums


class Routing:
    """Routing of one micro-batch on one rank, in all layers of the rank.

    Args:
        tokens: [n] int64, index in the micro-batch of each token of this rank; -1 for padding.
        lengths: [B] int64, lengths of the rows, on the device of `tokens`.
        given: int32 [N, L, K] for all tokens of the micro-batch: the experts in every layer, -1 where the router
            chooses; None if it chooses everywhere.
        weights: [B], weight of each row's balance loss; None without balance loss.
        sharing: groups of ranks that have other tokens of the same rows.
        sums: sums over the pipeline stages, for the balance loss.
        num_layers: layers of the whole model.
        counts: count the tokens of each expert.

    Attributes:
        chosen: by layer (from 0) the experts [n, K] of the tokens.
        sent: by layer how many tokens of each row [B] were sent to each expert [E]; float32 [B, E], or [1, E] for all
            rows together without balance loss.
    """

    def __init__(
        self,
        *,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        given: torch.Tensor | None,
        weights: torch.Tensor | None,
        sharing: Sequence[dist.ProcessGroup],
        sums: StageSums,
        num_layers: int,
        counts: bool,
    ) -> None:
        self.counts = counts
        ends = lengths.cumsum(0)
        self.tokens = tokens
        self.chosen: dict[int, torch.Tensor] = {}
        self.sent: dict[int, torch.Tensor] = {}
        self._expected: dict[int, torch.Tensor] = {}
        # No synchronization with the device: padding gets a row and a token of its own, after all others.
        is_token = tokens >= 0
        row = torch.searchsorted(ends, tokens.clamp(min=0), right=True)
        self._row = row.where(is_token, len(lengths))
        self._lengths = lengths
        # Sums over rows are matrix products: atomic additions to few places would wait for one another.
        row_of_token, num_rows = (self._row, len(lengths)) if weights is not None else ((~is_token).long(), 1)
        self._members = torch.zeros(num_rows + 1, len(tokens), device=tokens.device)
        self._members = self._members.scatter_(0, row_of_token[None], 1.0)[:-1]
        self._given = None
        if given is not None:
            given = torch.cat([given, given.new_full((1, *given.shape[1:]), -1)])
            self._given = given[tokens.where(is_token, len(given) - 1)]
        self._weights = weights
        self._sharing = sharing
        self._sums = sums
        self._num_layers = num_layers

    @property
    def balances(self) -> bool:
        """Whether there is a balance loss."""
        return self._weights is not None

    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """Return and record the experts [n, K] of the tokens, where `own` are the router's."""
        if self._given is not None:
            given = self._given[:, layer]
            own = own.where(given < 0, given.long())
        self.chosen[layer] = own
        return own

    def count(self, layer: int, routing_map: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        """Sum a layer's routing by rows. A recomputed layer overwrites its first result.

        Args:
            routing_map: [n, E] bool.
            probabilities: [n, E] router probabilities; None without balance loss.
        """
        self.sent[layer] = self._by_row(routing_map)
        if probabilities is not None:
            self._expected[layer] = self._by_row(probabilities)

    def _by_row(self, values: torch.Tensor) -> torch.Tensor:
        return self._members @ values.detach().float()

    def end_of_chunk(self, chunk: int, layers: Sequence[int]) -> None:
        """Send the sums over a chunk's layers to the other stages. Collective over `sharing`."""
        if not self.balances:
            return
        parts = [torch.stack([part[layer] for layer in layers]).sum(0) for part in (self.sent, self._expected)]
        own = torch.stack(parts)
        for group in self._sharing:
            dist.all_reduce(own, group=group)
        self._sums.add(chunk, own)

    def losses(self) -> torch.Tensor:
        """The balance loss of each row [B], as `row_balance_losses` defines it, on the last stage."""
        sent, expected = self._sums.total()
        size = (self._lengths * self._num_layers).clamp(min=1).float()
        return sent.shape[-1] * (sent * expected).sum(-1) / size.square()

    def gradient(self) -> torch.Tensor:
        """Gradient [n, E] of the weighted balance loss with respect to the router probabilities, in every layer."""
        assert self._weights is not None
        sent = self._sums.total()[0]
        size = (self._lengths * self._num_layers).clamp(min=1).float()
        of_rows = sent * (self._weights * sent.shape[-1] / size.square())[:, None]
        return torch.cat([of_rows, of_rows.new_zeros(1, sent.shape[-1])])[self._row]
