"""Which experts tokens are sent to: given or kept (router replay), counted, and kept in even use."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter

from tidemill_engines.megatron.parallel.stage_sums import StageSums
from tidemill_engines.megatron.patches.dispatcher import replace_dispatchers

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Routing:
    """The tokens of one micro-batch on one rank, on their way through all layers that the rank has.

    Args:
        tokens: [n] int64, which token of the micro-batch each of this rank's is; -1 for padding.
        lengths: [B] int64, of the rows, on the device of `tokens`.
        given: int32 [N, L, K] of all tokens of the micro-batch: the experts in every layer, -1 where the router
            chooses; None if it does everywhere.
        weights: [B], what the balance loss of each row is multiplied by; None where it is not wanted.
        sharing: groups of ranks that have other tokens of the same rows.
        sums: what the stages have to tell one another about the loss.
        counts: whether it is wanted how many tokens experts have.

    Attributes:
        chosen: by layer (from 0) the experts [n, K] that tokens were sent to.
        sent: by layer how many tokens of each row [B] were sent to each expert [E]; float32 [B, E], or [1, E] of all
            rows together where there is no balance loss.
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
        # Nothing here asks the device how many tokens there are: padding is a row and a token of its own, behind all.
        is_token = tokens >= 0
        row = torch.searchsorted(ends, tokens.clamp(min=0), right=True)
        self._row = row.where(is_token, len(lengths))
        self._lengths = lengths
        # Sums over rows as a product: as many additions to a few places would wait for one another.
        of_row, num_rows = (self._row, len(lengths)) if weights is not None else ((~is_token).long(), 1)
        self._members = torch.zeros(num_rows + 1, len(tokens), device=tokens.device).scatter_(0, of_row[None], 1.0)[:-1]
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
        return self._weights is not None

    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """The experts [n, K] of the tokens, where `own` are the router's."""
        if self._given is not None:
            given = self._given[:, layer]
            own = own.where(given < 0, given.long())
        self.chosen[layer] = own
        return own

    def count(self, layer: int, routing_map: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        """Adds up by rows what a layer does with its tokens; if it is recomputed, in the place of the first time.

        Args:
            routing_map: [n, E] bool.
            probabilities: [n, E] that a token is sent to an expert; None if there is no balance loss.
        """
        self.sent[layer] = self._by_row(routing_map)
        if probabilities is not None:
            self._expected[layer] = self._by_row(probabilities)

    def _by_row(self, values: torch.Tensor) -> torch.Tensor:
        return self._members @ values.detach().float()

    def end_of_chunk(self, chunk: int, layers: Sequence[int]) -> None:
        """Tells the other stages about the layers of a chunk that were just computed. Collective over `sharing`."""
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
        """[n, E]: of the weighted loss, with respect to the probabilities in each of the layers."""
        assert self._weights is not None
        sent = self._sums.total()[0]
        size = (self._lengths * self._num_layers).clamp(min=1).float()
        of_rows = sent * (self._weights * sent.shape[-1] / size.square())[:, None]
        return torch.cat([of_rows, of_rows.new_zeros(1, sent.shape[-1])])[self._row]


class Router(TopKRouter):
    """Megatron's router, which does as the `Routing` of the micro-batch says that its model is given."""

    routing_of_batch: Routing | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = _Choice(self)  # Megatron asks it for the experts

    @property
    def layer(self) -> int:
        """In the whole model, from 0."""
        assert self.layer_number is not None
        return self.layer_number - 1

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = super().routing(logits, padding_mask)
        routing = self.routing_of_batch
        if routing is None:
            return probs, routing_map
        probabilities = None
        if routing.balances:
            probabilities = logits.view(-1, logits.shape[-1]).float().softmax(-1)
            probs = _Balanced.apply(probs, probabilities, routing)  # type: ignore[assignment]
        if routing.counts:
            routing.count(self.layer, routing_map, probabilities)
        return probs, routing_map

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Does nothing: the bias of a trained model stays as it is, so tokens need not be counted for it."""


class RoutedModel(GPTModel):
    """Megatron's model, whose routers do as the `PackedRows` say that it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace_dispatchers(self)
        self._routers = [module for module in self.modules() if isinstance(module, Router)]

    def forward(self, *args: Any, packed_seq_params: Any, **kwargs: Any) -> torch.Tensor:
        routers = self._routers
        routing: Routing | None = packed_seq_params.routing
        _give(routers, routing)
        output = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        if routing is None:
            return output
        routing.end_of_chunk(self.vp_stage or 0, [router.layer for router in routers])
        resumed = _Resumed.apply(output, routers, routing)
        assert isinstance(resumed, torch.Tensor)
        return resumed


class _Choice:
    """In the place of Megatron's `RouterReplay`, whose objects all models of a process share."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._router.routing_of_batch is None:
            return values, indices
        indices = self._router.routing_of_batch.choose(self._router.layer, indices)
        return scores.gather(1, indices), indices


class _Balanced(torch.autograd.Function):
    """Adds the gradient of the balance loss, which depends on all layers: these have been computed by the backward."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, probabilities: torch.Tensor, routing: Routing) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.routing = routing
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, ctx.routing.gradient(), None


class _Resumed(torch.autograd.Function):
    """Passes on the output of a chunk. In the backward its routers, which may be recomputed, are given `routing`."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, output: torch.Tensor, routers: Sequence[Router], routing: Routing | None
    ) -> torch.Tensor:
        ctx.routers, ctx.routing = routers, routing
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _give(ctx.routers, ctx.routing)
        return grad, None, None


def _give(routers: Sequence[Router], routing: Routing | None) -> None:
    """Lets the routers of a chunk route a micro-batch."""
    for router in routers:
        router.routing_of_batch = routing
