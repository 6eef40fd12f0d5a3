"""Token dispatcher of MoE layers that permutes rows by index.

Upstream does:
    Without Transformer Engine's kernels (`moe_permute_fusion`), `MoEAlltoAllTokenDispatcher` sums the copies of a token
    with `scatter_add_`, one atomic operation per number, splits the tokens it receives into one tensor per expert and
    source rank, and copies counts to the CPU in four places of each layer (`moe_utils.py`, `token_dispatcher.py`).

Problem:
    Slow: these kernels and synchronizations take most of the time of a MoE layer. Here the device is synchronized once
    per layer, for the sizes of the all-to-all, and rows are gathered by index in forward and backward.

Seen in:
    megatron-core 0.16.1

Remove when:
    Megatron's dispatcher is as fast without Transformer Engine, or the engine requires Transformer Engine for MoE.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import nn

_RowFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Permutation:
    """Order of the K copies of n tokens, sorted by expert.

    Attributes:
        experts, tokens: [n * K] int64, expert and token of each copy.
        copies: [n, K] int64, the copies of each token.
    """

    experts: torch.Tensor
    tokens: torch.Tensor
    copies: torch.Tensor

    @classmethod
    def from_routing_map(cls, routing_map: torch.Tensor, top_k: int) -> "Permutation":
        """
        Args:
            routing_map: [n, E] bool, with exactly `top_k` experts for each token; this is not checked.
        """
        experts, tokens = torch.nonzero_static(routing_map.T, size=len(routing_map) * top_k).unbind(1)
        # Every token has the same number of copies, so sorting by token makes its copies consecutive.
        copies = tokens.argsort(stable=True).view(-1, top_k)
        return cls(experts=experts, tokens=tokens, copies=copies)


def permute(tokens: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """Return the copies [n * K, H] of tokens [n, H]. The backward sums the copies of a token in float32."""
    return _apply_linear(tokens, partial(_copy, permutation), partial(_sum, permutation))


def unpermute(copies: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """Return the sum [n, H] of the copies [n * K, H] of each token, rounded after a sum in float32."""
    return _apply_linear(copies, partial(_sum, permutation), partial(_copy, permutation))


def _apply_linear(x: torch.Tensor, function: _RowFunction, transpose: _RowFunction) -> torch.Tensor:
    out = _Linear.apply(x, function, transpose)
    assert isinstance(out, torch.Tensor)
    return out


class _Linear(torch.autograd.Function):
    """A linear function of rows; its backward is the transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: _RowFunction, transpose: _RowFunction) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.transpose = transpose
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.transpose(grad), None, None


def _copy(permutation: Permutation, tokens: torch.Tensor) -> torch.Tensor:
    return tokens.index_select(0, permutation.tokens)


def _sum(permutation: Permutation, copies: torch.Tensor) -> torch.Tensor:
    indices = permutation.copies
    return copies.index_select(0, indices.flatten()).view(*indices.shape, -1).sum(1)


def transposed_runs(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the row indices that turn A groups of B runs into B groups of A runs.

    Args:
        counts: [A, B] int64, the number of rows of each run.
        num_rows: sum of `counts`, given so that the device is not synchronized.

    Returns:
        [num_rows] int64. The indices for `counts.T` are the inverse.
    """
    starts = counts.flatten().cumsum(0).view_as(counts) - counts
    runs = counts.T.flatten()
    shift = starts.T.flatten() - (runs.cumsum(0) - runs)
    rows = torch.arange(num_rows, device=counts.device)
    return rows + shift.repeat_interleave(runs, output_size=num_rows)


def reorder(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return the rows of x in `order`, a permutation of all rows whose inverse is `inverse`."""
    return _apply_linear(x, lambda rows: rows.index_select(0, order), lambda rows: rows.index_select(0, inverse))


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's alltoall dispatcher with rows gathered by index and one synchronization per layer."""

    _permutation: Permutation
    _counts: torch.Tensor  # [sources, experts of this rank], on the device
    _order: torch.Tensor
    _inverse: torch.Tensor

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden_states: [..., H] of n tokens.
            routing_map, probs: [n, E].

        Returns:
            [n * K, H] and [n * K], sorted by expert.
        """
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        tokens_per_expert = self.preprocess(routing_map)
        self._counts = self.num_global_tokens_per_local_expert if self.num_local_experts > 1 else tokens_per_expert
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", tokens_per_expert)
        return self._permute(hidden_states.view(-1, self.hidden_shape[-1]), routing_map, probs)

    def _permute(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._permutation = permutation = Permutation.from_routing_map(routing_map, self.config.moe_router_topk)
        probs_of_copies = probs.flatten().gather(0, permutation.tokens * self.num_experts + permutation.experts)
        return permute(tokens, permutation), probs_of_copies

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort the received tokens by expert.

        Returns:
            tokens [m, H], number of tokens of each expert (on the CPU), and the factors of the experts' outputs [m].
        """
        tokens, probs = global_input_tokens, global_probs
        if self.tp_size > 1:
            sizes = self._sizes_of_tensor_parallel_ranks
            tokens = gather_from_sequence_parallel_region(tokens, group=self.tp_group, output_split_sizes=sizes)
            probs = gather_from_sequence_parallel_region(probs, group=self.tp_group, output_split_sizes=sizes)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        if self._sorts_received_tokens:
            self._order, self._inverse = (
                transposed_runs(counts, len(tokens)) for counts in (self._counts, self._counts.T)
            )
            tokens, probs = (reorder(x, self._order, self._inverse) for x in (tokens, probs))
        tokens_per_expert = self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert = None
        return tokens, tokens_per_expert, probs

    @property
    def _sizes_of_tensor_parallel_ranks(self) -> list[int]:
        assert self.output_splits_tp is not None
        return self.output_splits_tp.tolist()

    @property
    def _sorts_received_tokens(self) -> bool:
        return self.num_local_experts > 1 and self.tp_size * self.ep_size > 1

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._sorts_received_tokens:
            hidden_states = reorder(hidden_states, self._inverse, self._order)
        if self.tp_size > 1:
            dtype = hidden_states.dtype
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs.dtype),
                group=self.tp_group,
                input_split_sizes=self._sizes_of_tensor_parallel_ranks,
            ).to(dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        return unpermute(permutated_local_input_tokens, self._permutation).view(self.hidden_shape)


def replace_dispatchers(model: nn.Module, kind: type[Dispatcher] = Dispatcher) -> None:
    """Give the MoE layers of a model this dispatcher, except where Megatron uses Transformer Engine's kernels."""
    for layer in _moe_layers(model):
        if layer.config.moe_token_dispatcher_type == "alltoall" and not layer.config.moe_permute_fusion:
            layer.token_dispatcher = kind(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=get_default_pg_collection(),
            )


def release_activations(chunks: Sequence[nn.Module]) -> None:
    """Drop the tensors of the last micro-batch that dispatchers keep.

    Through their autograd graph they reference Megatron's gradient hooks and so the model: a reference cycle that
    Python's garbage collector does not see.
    """
    for layer in chain.from_iterable(map(_moe_layers, chunks)):
        attributes = vars(layer.token_dispatcher)
        graphs = [name for name, value in attributes.items() if isinstance(value, torch.Tensor) and value.requires_grad]
        attributes.update(dict.fromkeys(graphs))


def _moe_layers(model: nn.Module) -> Iterator[MoELayer]:
    return (module for module in model.modules() if isinstance(module, MoELayer))
