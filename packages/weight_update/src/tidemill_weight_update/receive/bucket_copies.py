"""The copies that an engine rank makes of one bucket."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.copy.checksum import TensorSums
from tidemill_weight_update.copy.copier import HostCopier
from tidemill_weight_update.copy.table import CopyTable, build_tables
from tidemill_weight_update.copy.tiles import interleave
from tidemill_weight_update.memory.handle import DeviceMemory, Memory
from tidemill_weight_update.memory.mapped import MappedMemories
from tidemill_weight_update.plan.plan import Copy, CopyPlan
from tidemill_weight_update.tensors.box import Box, contiguous_strides

if TYPE_CHECKING:
    from tidemill_weight_update.copy.cuda import CudaCopier


class BucketCopies:
    """Built once for a bucket descriptor and a plan, run at each update.

    Args:
        descriptor: descriptor that a trainer rank announced.
        plan: plan of at least the sources in `descriptor`.
        parameters: parameters of the model, by name.
        device: device of the model.

    Attributes:
        counts: number of elements of each source that are copied here, int64 [num_sources].
        sums: checksums of the sources, as the last run read them.
        staged: sources that are loaded by the model's own loader; their copies need `run(staging=...)`.
    """

    def __init__(
        self, descriptor: BucketDescriptor, plan: CopyPlan, parameters: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.descriptor = descriptor
        self._device = device
        names = {source.name for source in descriptor.sources}
        self.staged = tuple(source for source in descriptor.sources if source.name in plan.through_loader)
        copies = [copy for copy in plan.copies if copy.name in names]
        copies += [
            Copy(s.name, Box.whole(s.shape), f"staged {s.name}", 0, contiguous_strides(s.shape), s.dtype)
            for s in self.staged
        ]
        self._targets = tuple(dict.fromkeys(copy.parameter for copy in copies))
        shards = {source.name: shards for source, shards in zip(descriptor.sources, descriptor.shards, strict=True)}
        self._tables = build_tables(copies, descriptor.sources, shards, self._targets, complete=False)
        self._parameters = {name: parameters[name].detach() for name in self._targets if name in parameters}
        self.counts = _counts(self._tables, len(descriptor.sources))
        self.sums = TensorSums(len(descriptor.sources), device, counts_non_finite=False)
        self._gpu_copier: CudaCopier | None = None
        # If parameters move, a new plan is recorded and a new object of this class reads their addresses.
        self._addresses = [] if self.staged else [place.data_ptr() for place in self._places({})]
        self._host_copier: HostCopier | None = None
        if device.type == "cpu" and not self.staged:
            self._host_copier = HostCopier(self._tables, self._places({}))

    def run(self, arena: Memory | Tensor | None, mapped: MappedMemories, staging: Mapping[str, Tensor]) -> None:
        """Copy, and compute the checksums of what is copied. On a GPU the work is queued on the current stream.

        Args:
            arena: memory that holds the pieces, of the trainer or of this process; None: the descriptor lists its
                memories.
            mapped: opens memories of the trainer.
            staging: source name -> tensor that receives a staged source.
        """
        self.sums.clear()
        if self._tables:
            self._run(arena, mapped, staging)
        self.sums.fetch()

    def _run(self, arena: Memory | Tensor | None, mapped: MappedMemories, staging: Mapping[str, Tensor]) -> None:
        memories = self.descriptor.memories if arena is None else (arena,)
        if self._device.type == "cpu":
            copier = self._host_copier or HostCopier(self._tables, self._places(staging))
            copier.run([_on_host(memory, mapped) for memory in memories], self.sums.checksums)
        else:
            addresses = self._addresses or [place.data_ptr() for place in self._places(staging)]
            self._run_on_gpu(arena, mapped, addresses)

    def forget(self) -> None:
        """Drop views of memory that the last runs read."""
        if self._host_copier is not None:
            self._host_copier.forget()

    def _run_on_gpu(self, arena: Memory | Tensor | None, mapped: MappedMemories, targets: Sequence[int]) -> None:
        from tidemill_weight_update.copy.cuda import CudaCopier

        if self._gpu_copier is None:
            self._gpu_copier = CudaCopier(self._paced() if arena is None else self._tables, self._device)
        upload = None  # referenced until the copies are queued: the allocator reuses memory in stream order
        if arena is None:
            bases = mapped.addresses(self.descriptor.memories)
        elif isinstance(arena, DeviceMemory):
            bases = [mapped.address(arena)]
        else:
            upload = (arena if isinstance(arena, Tensor) else mapped.tensor(arena)).to(self._device)
            bases = [upload.data_ptr()]
        self._gpu_copier.run(bases, targets, self.sums.checksums)

    def _paced(self) -> list[CopyTable]:
        """Return the tables in an order that reads evenly from the GPUs that hold the memories."""
        gpus = {memory.device_uuid: number for number, memory in enumerate(self.descriptor.memories)}
        origin = np.array([gpus[memory.device_uuid] for memory in self.descriptor.memories], np.int64)
        return [interleave(table, origin) for table in self._tables]

    def _places(self, staging: Mapping[str, Tensor]) -> list[Tensor]:
        staged = {f"staged {name}": tensor for name, tensor in staging.items()}
        return [self._parameters[name] if name in self._parameters else staged[name] for name in self._targets]


def _counts(tables: Sequence[CopyTable], num_sources: int) -> np.ndarray:
    counts = np.zeros(num_sources, np.int64)
    for table in tables:
        np.add.at(counts, table.tensor, table.rows * table.cols)
    return counts


def _on_host(memory: Memory | Tensor, mapped: MappedMemories) -> Tensor:
    if isinstance(memory, DeviceMemory):
        raise RuntimeError("an engine on a CPU cannot read GPU memory; pass device='cpu' to WeightUpdater")
    return memory if isinstance(memory, Tensor) else mapped.tensor(memory)
