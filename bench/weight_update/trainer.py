"""One rank of the trainer: its process group and its weights."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from tidemill_weight_update import LocalShard
from tidemill_weight_update.fp8 import BlockFp8
from torch import Tensor

from weight_update.case import Case
from weight_update.fsdp2 import FSDP2Weights, PlainWeights
from weight_update.megatron import MegatronWeights
from weight_update.shapes import Weight, batches

COLLECTIVE_TIMEOUT = timedelta(seconds=240)


class HeldWeights(Protocol):
    """The part of the weights that a rank holds."""

    @property
    def named(self) -> Sequence[tuple[str, Tensor | LocalShard]]:
        """Arguments for the updater: the same objects each time."""
        ...

    def full(self, name: str) -> Tensor:
        """Return the whole tensor; collective."""
        ...

    def change(self, name: str | None) -> None:
        """Assign new random values to all tensors, or to the one of this name, in place. Collective."""
        ...


class Trainer:
    """One rank of the trainer, in its process group.

    Attributes:
        rank: rank of this process.
        num_ranks: number of trainer ranks.
        device: device of this rank.
        weights: all weights, in the order of the layers.
    """

    def __init__(self, case: Case, rank: int, folder: str, weights: Sequence[Weight]) -> None:
        self.rank = rank
        self.num_ranks = case.num_trainers
        self.weights = weights
        self.device = torch.device("cuda", rank) if case.is_cuda else torch.device("cpu")
        if case.is_cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if case.is_cuda else "gloo",
            init_method=f"file://{Path(folder, 'store')}",
            rank=rank,
            world_size=case.num_trainers,
            timeout=COLLECTIVE_TIMEOUT * case.num_engines,  # the other ranks wait here while rank 0 starts the engines
        )
        torch.manual_seed(rank)
        self._piece = self._hold(case)
        self._in_fp8 = BlockFp8(self._piece.named) if case.is_fp8 else None
        self.change()

    def _hold(self, case: Case) -> HeldWeights:
        if case.layout is not None:
            return MegatronWeights(case.config, case.layout, self.rank, self.device)
        return (PlainWeights if case.num_trainers == 1 else FSDP2Weights)(self.weights, self.device)

    @property
    def named(self) -> Sequence[tuple[str, Tensor | LocalShard]]:
        """The part of the weights that this rank holds, as arguments for the updater; in float8 if the engine is."""
        return self._piece.named if self._in_fp8 is None else self._in_fp8.quantize()

    def quantize(self) -> None:
        """Write the current values to the float8 tensors of `named`, if the engine is in float8."""
        if self._in_fp8 is not None:
            self._in_fp8.quantize()

    def in_engine_dtype(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return whole tensors as the engine has them."""
        return list(named) if self._in_fp8 is None else BlockFp8(named).quantize()

    def full(self, name: str) -> Tensor:
        """Return the whole tensor. Collective."""
        return self._piece.full(name)

    @torch.no_grad()
    def change(self, name: str | None = None) -> None:
        """Assign new random values to all parameters, or to the one of this name, in place. Collective."""
        self._piece.change(name)

    def batches(self, max_bytes: int) -> list[list[str]]:
        """Return the names of all tensors in runs of at most `max_bytes`, or of one tensor."""
        return batches([(weight.name, weight.num_bytes) for weight in self.weights], max_bytes)

    def synchronize(self) -> None:
        """Return when all ranks are here and their GPUs are idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.agree(0.0)

    def agree(self, number: float) -> float:
        """Return rank 0's number on all ranks."""
        box = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(box, 0)
        return box.item()

    def close(self) -> None:
        dist.destroy_process_group()
