"""Token dispatchers of MoE layers that permute rows by index.

Upstream does:
    Without Transformer Engine's kernels (`moe_permute_fusion`), dispatchers sum the copies of a token with
    `scatter_add_`, one atomic operation per number. `MoEAlltoAllTokenDispatcher` splits the tokens it receives into one
    tensor per expert and source rank, and copies counts to the CPU in four places of each layer.
    `MoEAllGatherTokenDispatcher` waits for the counts after it has gathered all tokens, and returns the results in the
    dtype of the router, float32 (`moe_utils.py`, `token_dispatcher.py`).

Problem:
    Slow: these kernels, bytes and synchronizations take most of the time of a MoE layer. Here the device is
    synchronized once per layer, for the numbers of tokens, and rows are gathered by index in forward and backward.

Seen in:
    megatron-core 0.16.1

Remove when:
    Megatron's dispatchers are as fast without Transformer Engine, or the engine requires Transformer Engine for MoE.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from tidemill_engines.megatron.patches.compiled import compile_for_any_length

_RowFunction = Callable[[torch.Tensor], torch.Tensor]
_Sum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Permutation:
    """Order of the m copies of n tokens, sorted by expert; a token has at most K copies.

    Attributes:
        tokens: [m] int64, token of each copy.
        slots: [m] int64, position of each copy in the flattened table of probabilities, of n rows.
        copies: [n, K] int64 or int32, the copies of each token; at least m where it has fewer than K.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
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
        return cls(tokens=tokens, slots=tokens * routing_map.shape[1] + experts, copies=copies)


def sum_copies(copies: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the sum [n, H] of the copies [m, H] of each token, rounded after a sum in float32.

    Args:
        places: [n, K], see `Permutation.copies`.
    """
    total = torch.zeros(len(places), copies.shape[1], dtype=torch.float32, device=copies.device)
    for place in places.unbind(1):
        exists = place < len(copies)
        total = total + copies.index_select(0, place.where(exists, 0)).where(exists.unsqueeze(1), 0.0)
    return total.to(copies.dtype)


@cache
def _compiled_sum() -> _Sum:
    return compile_for_any_length(sum_copies)


def permute(tokens: torch.Tensor, permutation: Permutation, add: _Sum = sum_copies) -> torch.Tensor:
    """Return the copies [m, H] of tokens [n, H]. The backward sums the copies of a token in float32."""
    return _apply_linear(tokens, partial(_copy, permutation), partial(_sum, permutation, add))


def unpermute(copies: torch.Tensor, permutation: Permutation, add: _Sum = sum_copies) -> torch.Tensor:
    """Return the sum [n, H] of the copies [m, H] of each token, rounded after a sum in float32."""
    return _apply_linear(copies, partial(_sum, permutation, add), partial(_copy, permutation))


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


def _sum(permutation: Permutation, add: _Sum, copies: torch.Tensor) -> torch.Tensor:
    places = permutation.copies
    return add(copies, places) if len(copies) else copies.new_zeros(len(places), copies.shape[1])


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
        return permute(tokens, permutation, _sum_of(self.config)), probs.flatten().gather(0, permutation.slots)

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
            del self._inverse, self._order  # layers that are recomputed need no memory for them
        if self.tp_size > 1:
            dtype = hidden_states.dtype
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs.dtype),
                group=self.tp_group,
                input_split_sizes=self._sizes_of_tensor_parallel_ranks,
            ).to(dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        permutation = self._permutation
        del self._permutation
        return unpermute(permutated_local_input_tokens, permutation, _sum_of(self.config)).view(self.hidden_shape)


class LocalCopies:
    """The copies of n tokens for some experts, sorted by expert. Their number is on its way to the CPU.

    Args:
        experts: [n, K] int64, the experts of each token.
        first, num_experts: the experts whose copies are wanted.
    """

    def __init__(self, experts: torch.Tensor, first: int, num_experts: int) -> None:
        keys = experts - first
        keys = keys.where((keys >= 0) & (keys < num_experts), num_experts).to(torch.int16)  # fewer passes of the sort
        keys, self._slots = keys.flatten().sort(stable=True)
        numbers = torch.arange(num_experts, dtype=keys.dtype, device=keys.device)
        self._ends = torch.searchsorted(keys, numbers, right=True).to("cpu", non_blocking=True)
        self._arrival = torch.cuda.current_stream(keys.device).record_event() if keys.is_cuda else None
        order = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
        self._copies = torch.empty_like(order).scatter_(0, self._slots, order).view_as(experts)

    def wait(self) -> tuple[Permutation, torch.Tensor]:
        """Return the order of the copies, and their number for each expert, int64 on the CPU."""
        if self._arrival is not None:
            self._arrival.synchronize()
        counts = self._ends.diff(prepend=self._ends.new_zeros(1))
        slots = self._slots[: int(self._ends[-1])].clone()  # the backward keeps these only
        return Permutation(tokens=slots // self._copies.shape[1], slots=slots, copies=self._copies), counts


class AllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's allgather dispatcher with rows gathered by index and one synchronization per layer.

    Tokens go to each rank once, however many of its experts they have. The device is busy with gathering them while
    the CPU waits for their numbers. Each rank returns one row for each token, in the dtype of the tokens.
    """

    _local: LocalCopies
    _permutation: Permutation

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden_states: [..., H] of n tokens.
            routing_map, probs: [n, E], with K experts for each token.

        Returns:
            [n, H] and [n, K].
        """
        self.hidden_shape, top_k = hidden_states.shape, self.config.moe_router_topk
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        experts = torch.nonzero_static(routing_map, size=len(tokens) * top_k)[:, 1].contiguous().view(-1, top_k)
        of_all_ranks = gather_tokens(experts, self.tp_ep_group)
        self._local = LocalCopies(of_all_ranks, self.local_expert_indices[0], self.num_local_experts)
        return tokens, probs.gather(1, experts)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gather_tokens(hidden_states, self.tp_ep_group), gather_tokens(probs, self.tp_ep_group)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the copies for the experts of this rank, as `Dispatcher.dispatch_postprocess` does."""
        self._permutation, counts = self._local.wait()
        del self._local
        tokens = permute(hidden_states, self._permutation, _sum_of(self.config))
        return tokens, counts, probs.flatten().gather(0, self._permutation.slots)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        permutation = self._permutation
        del self._permutation
        return unpermute(hidden_states, permutation, _sum_of(self.config))

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return sum_tokens(hidden_states, self.tp_ep_group)


def gather_tokens(tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks of `group`, which have equal numbers of them; the backward is `sum_tokens`."""
    return _apply_linear(tokens, partial(_gather, group), partial(_reduce, group))


def sum_tokens(tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks, rounded after a sum in float32; the backward is
    `gather_tokens`.
    """
    return _apply_linear(tokens, partial(_reduce, group), partial(_gather, group))


def _gather(group: dist.ProcessGroup, rows: torch.Tensor) -> torch.Tensor:
    size = dist.get_world_size(group)
    if size == 1:
        return rows
    gathered = rows.new_empty(size * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
    return gathered


def _reduce(group: dist.ProcessGroup, rows: torch.Tensor) -> torch.Tensor:
    size = dist.get_world_size(group)
    if size == 1:
        return rows
    parts = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, rows.contiguous(), group=group)
    return parts.view(size, -1, *rows.shape[1:]).sum(0)


def _sum_of(config: TransformerConfig) -> _Sum:
    return _compiled_sum() if config.bias_activation_fusion else sum_copies


def replace_dispatchers(model: nn.Module, kind: type[Dispatcher] = Dispatcher) -> None:
    """Give the MoE layers of a model one of the dispatchers above, `kind` for the alltoall."""
    for layer in _moe_layers(model):
        gathers = layer.config.moe_token_dispatcher_type == "allgather"
        layer.token_dispatcher = (AllGatherDispatcher if gathers else kind)(
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
