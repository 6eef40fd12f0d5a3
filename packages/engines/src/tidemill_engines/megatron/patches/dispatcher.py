"""How tokens get to their experts and back, without additions to the same place and without asking the device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
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

from tidemill_engines.megatron.patches.compiled import for_any_length

_OfRows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Places:
    """Where the K copies of n tokens lie when they are sorted by expert.

    Attributes:
        experts, tokens: [n * K] int64, of each copy.
        copies: [n, K] int64, those of each token.
        fused: whether one kernel, by torch.compile, adds copies up where they lie.
    """

    experts: torch.Tensor
    tokens: torch.Tensor
    copies: torch.Tensor
    fused: bool = False

    @classmethod
    def of(cls, routing_map: torch.Tensor, top_k: int, *, fused: bool = False) -> "Places":
        """
        Args:
            routing_map: [n, E] bool, with `top_k` experts for each token; that they are as many is not checked.
        """
        experts, tokens = torch.nonzero_static(routing_map.T, size=len(routing_map) * top_k).unbind(1)
        # Each token has as many copies, so its own come one after another when copies are sorted by token.
        copies = tokens.argsort(stable=True).view(-1, top_k)
        return cls(experts=experts, tokens=tokens, copies=copies, fused=fused)


def copied(tokens: torch.Tensor, places: Places) -> torch.Tensor:
    """The copies [n * K, H] of tokens [n, H]. Backwards, those of a token are added up, in float32."""
    return _linear(tokens, partial(_copy, places), partial(_sum, places))


def summed(copies: torch.Tensor, places: Places) -> torch.Tensor:
    """The sum [n, H] of the copies [n * K, H] of each token, in float32 before it is rounded."""
    return _linear(copies, partial(_sum, places), partial(_copy, places))


def _linear(x: torch.Tensor, there: _OfRows, back: _OfRows) -> torch.Tensor:
    out = _Linear.apply(x, there, back)
    assert isinstance(out, torch.Tensor)
    return out


class _Linear(torch.autograd.Function):
    """A linear operation on rows, and on their gradient its transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: _OfRows, back: _OfRows) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.back(grad), None, None


def _copy(places: Places, tokens: torch.Tensor) -> torch.Tensor:
    return tokens.index_select(0, places.tokens)


def _sum(places: Places, copies: torch.Tensor) -> torch.Tensor:
    add_up = _compiled_sum() if places.fused else _gathered_sum
    return add_up(places.copies, copies)


def _gathered_sum(places: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    return copies.index_select(0, places.flatten()).view(*places.shape, -1).sum(1)


@cache
def _compiled_sum() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def unrolled(places: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        return reduce(torch.add, (copies.index_select(0, place).float() for place in places.unbind(1))).to(copies.dtype)

    return for_any_length(unrolled)


def turned(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Where rows come from that lie in A runs of B runs each, when those of B shall lie first.

    Args:
        counts: [A, B] int64, the rows of each run.
        num_rows: their sum, which the device is not asked for.

    Returns:
        [num_rows] int64; that of `counts.T` brings them back.
    """
    starts = counts.flatten().cumsum(0).view_as(counts) - counts
    runs = counts.T.flatten()
    shift = starts.T.flatten() - (runs.cumsum(0) - runs)
    rows = torch.arange(num_rows, device=counts.device)
    return rows + shift.repeat_interleave(runs, output_size=num_rows)


def moved(x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """The rows `order` of x, each of which is there once; `back` is the inverse of `order`."""
    return _linear(x, lambda rows: rows.index_select(0, order), lambda rows: rows.index_select(0, back))


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """As Megatron's alltoall dispatcher, whose kernels without Transformer Engine take most of a mixture's time.

    It asks the device for the number of tokens in four places of each layer, adds copies up with one atomic operation
    for each number, and cuts what it receives into a tensor for each expert and source. Here the device is asked once,
    for the sizes that the exchange needs, and rows are moved by index, forward and backward.
    """

    _places: Places
    _counts: torch.Tensor  # [sources, experts of this rank], on the device
    _order: torch.Tensor
    _back: torch.Tensor

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
        return self._sorted(hidden_states.view(-1, self.hidden_shape[-1]), routing_map, probs)

    def _sorted(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fused, top_k = self.config.bias_activation_fusion, self.config.moe_router_topk
        self._places = places = Places.of(routing_map, top_k, fused=fused)
        of_copies = probs.flatten().gather(0, places.tokens * self.num_experts + places.experts)
        return copied(tokens, places), of_copies

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sorts by expert what has come from other ranks.

        Returns:
            tokens [m, H], how many each expert has (on the CPU), and what their results are multiplied by [m].
        """
        tokens, probs = global_input_tokens, global_probs
        if self.tp_size > 1:
            sizes = self._sizes_of_tensor_parallel_ranks
            tokens = gather_from_sequence_parallel_region(tokens, group=self.tp_group, output_split_sizes=sizes)
            probs = gather_from_sequence_parallel_region(probs, group=self.tp_group, output_split_sizes=sizes)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        if self._is_sorted_again:
            self._order, self._back = (turned(counts, len(tokens)) for counts in (self._counts, self._counts.T))
            tokens, probs = (moved(x, self._order, self._back) for x in (tokens, probs))
        tokens_per_expert = self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert = None
        return tokens, tokens_per_expert, probs

    @property
    def _sizes_of_tensor_parallel_ranks(self) -> list[int]:
        assert self.output_splits_tp is not None
        return self.output_splits_tp.tolist()

    @property
    def _is_sorted_again(self) -> bool:
        return self.num_local_experts > 1 and self.tp_size * self.ep_size > 1

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._is_sorted_again:
            hidden_states = moved(hidden_states, self._back, self._order)
        if self.tp_size > 1:
            dtype = hidden_states.dtype
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs.dtype),
                group=self.tp_group,
                input_split_sizes=self._sizes_of_tensor_parallel_ranks,
            ).to(dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        return summed(permutated_local_input_tokens, self._places).view(self.hidden_shape)


def replace_dispatchers(model: nn.Module, kind: type[Dispatcher] = Dispatcher) -> None:
    """Gives the mixtures of a model this module's `Dispatcher`, where Megatron has no kernels of its own for it."""
    for layer in _mixtures(model):
        if layer.config.moe_token_dispatcher_type == "alltoall" and not layer.config.moe_permute_fusion:
            layer.token_dispatcher = kind(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=get_default_pg_collection(),
            )


def forget_tokens(chunks: Sequence[nn.Module]) -> None:
    """Lets go of the last micro-batch's tensors.

    Dispatchers keep some, and with them its graph, which leads to Megatron's hooks for gradients and so to the model: a
    cycle through memory that Python's garbage collector does not see.
    """
    for layer in chain.from_iterable(map(_mixtures, chunks)):
        kept = vars(layer.token_dispatcher)
        graphs = [name for name, value in kept.items() if isinstance(value, torch.Tensor) and value.requires_grad]
        kept.update(dict.fromkeys(graphs))


def _mixtures(model: nn.Module) -> Iterator[MoELayer]:
    return (module for module in model.modules() if isinstance(module, MoELayer))
