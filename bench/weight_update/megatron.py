"""Weights of a trainer with the layout of a Megatron rank, described as the Megatron engine describes them.

Megatron itself is not used: the parameters have its shapes and are split by the engine's own table. As with Megatron's
distributed optimizer, they are in one buffer.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.weights.names import blocks_of
from tidemill_engines.megatron.weights.placement import Block, Part, Placement
from tidemill_weight_update import LocalShard
from torch import Tensor

from weight_update.shapes import STD, Box

_ALIGNMENT = 64
"""Alignment in elements of each parameter in Megatron's buffer."""

Key = tuple[str, tuple[int, ...]]
"""Name of a tensor and start of a part in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronLayout:
    """Tensor parallelism, also of the experts, and expert parallelism over `tp * ep` ranks.

    Parameters other than those of experts are replicated `ep` times.
    """

    tp: int
    ep: int

    def placement(self, rank: int) -> Placement:
        tp = Part(rank=rank % self.tp, size=self.tp)
        return Placement(tp=tp, etp=tp, ep=Part(rank=rank // self.tp, size=self.ep))

    def parameters(self, config: dict[str, Any], rank: int) -> list[list[Block]]:
        """Return the blocks of each parameter of a rank."""
        architecture = Architecture.from_config(config)
        place = self.placement(rank)
        return [blocks_of(name, architecture, place) for name in _names(architecture, self.ep)]

    def boxes(self, config: dict[str, Any]) -> list[dict[str, list[Box]]]:
        """Return the parts of each tensor that each rank holds."""
        ranks: list[dict[str, list[Box]]] = []
        for rank in range(self.tp * self.ep):
            held: dict[str, list[Box]] = {}
            for block in (block for blocks in self.parameters(config, rank) for block in blocks):
                held.setdefault(block.name, []).append((block.start, block.shape))
            ranks.append(held)
        return ranks


class MegatronWeights:
    """The parameters of one rank."""

    def __init__(self, config: dict[str, Any], layout: MegatronLayout, rank: int, device: torch.device) -> None:
        boxes = layout.boxes(config)
        self._owners: dict[str, dict[Box, list[int]]] = {}
        for other, held in enumerate(boxes):
            for name, parts in held.items():
                for part in parts:
                    self._owners.setdefault(name, {}).setdefault(part, []).append(other)
        self._rank, self._device = rank, device
        self._parts: dict[Key, Tensor] = {}
        self.named: list[tuple[str, LocalShard]] = []
        self._num_changes = 0
        parameters = layout.parameters(config, rank)
        sizes = [_rows(blocks) * math.prod(blocks[0].shape[1:]) for blocks in parameters]
        places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        buffer = torch.empty(sum(places), dtype=torch.bfloat16, device=device)
        for blocks, place, size in zip(parameters, buffer.split(places), sizes, strict=True):
            self._describe(place[:size].view(_rows(blocks), *blocks[0].shape[1:]), blocks)

    def _describe(self, parameter: Tensor, blocks: list[Block]) -> None:
        for block in blocks:
            part = parameter[block.row : block.row + block.shape[0]]
            holders = self._owners[block.name][block.start, block.shape]
            self._parts[block.name, block.start] = part
            shard = LocalShard(
                tensor=part,
                global_shape=block.global_shape,
                start=block.start,
                replica=holders.index(self._rank),
                num_replicas=len(holders),
            )
            self.named.append((block.name, shard))

    def full(self, name: str) -> Tensor:
        """Return the whole tensor; each part is broadcast by one of its holders."""
        whole: Tensor | None = None
        for (start, shape), holders in self._owners[name].items():
            own = self._parts.get((name, start)) if holders[0] == self._rank else None
            part = torch.empty(shape, dtype=torch.bfloat16, device=self._device) if own is None else own.contiguous()
            dist.broadcast(part, holders[0])
            if whole is None:
                whole = torch.empty(self._shape(name), dtype=torch.bfloat16, device=self._device)
            whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))] = part
        assert whole is not None
        return whole

    def change(self, name: str | None) -> None:
        self._num_changes += 1
        generator = torch.Generator(self._device)
        for (known, start), part in self._parts.items():
            if name in (None, known):  # equal on all ranks that hold the part
                generator.manual_seed(zlib.crc32(f"{self._num_changes} {known} {start}".encode()))
                part.normal_(0.0, STD, generator=generator)

    def _shape(self, name: str) -> tuple[int, ...]:
        ends = [tuple(a + n for a, n in zip(start, shape, strict=True)) for start, shape in self._owners[name]]
        return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def _names(a: Architecture, ep: int) -> Iterator[str]:
    """Yield Megatron's parameter names on a rank without pipeline parallelism, in its order."""
    yield "embedding.word_embeddings.weight"
    for layer in range(a.num_hidden_layers):
        prefix = f"decoder.layers.{layer}."
        yield prefix + "input_layernorm.weight"
        yield prefix + "self_attention.linear_proj.weight"
        yield prefix + "self_attention.linear_qkv.weight"
        yield from (f"{prefix}self_attention.{part}_layernorm.weight" for part in "qk")
        yield prefix + "pre_mlp_layernorm.weight"
        if not a.num_experts:
            yield from (f"{prefix}mlp.linear_fc{fc}.weight" for fc in (1, 2))
            continue
        yield prefix + "mlp.router.weight"
        for expert in range(a.num_experts // ep):
            yield from (f"{prefix}mlp.experts.local_experts.{expert}.linear_fc{fc}.weight" for fc in (1, 2))
    yield "decoder.final_layernorm.weight"
    yield "output_layer.weight"


def _rows(blocks: list[Block]) -> int:
    return sum(block.shape[0] for block in blocks)
