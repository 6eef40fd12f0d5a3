"""Routers that use given experts (router replay), record and count their choices, and add the balance loss."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter

from tidemill_engines.megatron.batch.routing import Routing
from tidemill_engines.megatron.patches.dispatcher import replace_dispatchers

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Router(TopKRouter):
    """Megatron's router with the `Routing` of the micro-batch that its model was called with."""

    active_routing: Routing | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = _Choice(self)  # Megatron calls its get_replay_topk to choose the experts

    @property
    def layer(self) -> int:
        """Number of the layer in the whole model, from 0."""
        assert self.layer_number is not None
        return self.layer_number - 1

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = super().routing(logits, padding_mask)
        routing = self.active_routing
        if routing is None:
            return probs, routing_map
        probabilities = None
        if routing.balances:
            probabilities = logits.view(-1, logits.shape[-1]).float().softmax(-1)
            probs = _AddBalanceGradient.apply(probs, probabilities, routing)  # type: ignore[assignment]
        if routing.counts:
            routing.count(self.layer, routing_map, probabilities)
        return probs, routing_map

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Do nothing: the bias of a trained model is not updated, so tokens need not be counted for it."""


class RoutedModel(GPTModel):
    """Megatron's model whose routers get the `Routing` of the `PackedRows` that it is called with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace_dispatchers(self)
        self._routers = [module for module in self.modules() if isinstance(module, Router)]

    def forward(self, *args: Any, packed_seq_params: Any, **kwargs: Any) -> torch.Tensor:
        routers = self._routers
        routing: Routing | None = packed_seq_params.routing
        _activate(routers, routing)
        output = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        if routing is None:
            return output
        routing.end_of_chunk(self.vp_stage or 0, [router.layer for router in routers])
        output = _ActivateInBackward.apply(output, routers, routing)
        assert isinstance(output, torch.Tensor)
        return output


class _Choice:
    """Stand-in for Megatron's `RouterReplay`, whose instances are shared by all models of a process."""

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
        if self._router.active_routing is None:
            return values, indices
        indices = self._router.active_routing.choose(self._router.layer, indices)
        return scores.gather(1, indices), indices


class _AddBalanceGradient(torch.autograd.Function):
    """Adds the gradient of the balance loss, which depends on all layers; the backward runs after all of them."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, probabilities: torch.Tensor, routing: Routing) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.routing = routing
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, ctx.routing.gradient(), None


class _ActivateInBackward(torch.autograd.Function):
    """Returns a chunk's output; its backward activates `routing` again, because layers may be recomputed."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, output: torch.Tensor, routers: Sequence[Router], routing: Routing | None
    ) -> torch.Tensor:
        ctx.routers, ctx.routing = routers, routing
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _activate(ctx.routers, ctx.routing)
        return grad, None, None


def _activate(routers: Sequence[Router], routing: Routing | None) -> None:
    """Set the micro-batch that the routers of a chunk route."""
    for router in routers:
        router.active_routing = routing
