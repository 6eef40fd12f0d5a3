"""What an engine rank keeps between updates: plans, parsed descriptors, and copies built from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tidemill_weight_update.control.descriptor import (
    BucketDescriptor,
    descriptor_from_json,
    listing_from_json,
    memory_from_json,
    merge_descriptors,
)
from tidemill_weight_update.control.mailbox import Mailbox, Place
from tidemill_weight_update.copy.checksum import TensorSums
from tidemill_weight_update.copy.copier import HostCopier
from tidemill_weight_update.copy.table import CopyTable, build_tables
from tidemill_weight_update.copy.tiles import interleave
from tidemill_weight_update.memory.handle import DeviceMemory, Memory
from tidemill_weight_update.memory.mapped import MappedMemories
from tidemill_weight_update.plan.plan import Copy, CopyPlan
from tidemill_weight_update.plan.record import Recorder
from tidemill_weight_update.tensors.box import Box, are_disjoint, contiguous_strides
from tidemill_weight_update.tensors.spec import SourceSpec

if TYPE_CHECKING:
    from tidemill_weight_update.copy.cuda import CudaCopier

DescriptorKey = tuple[Mailbox, tuple[int, int]]
"""A journal and the place (offset, length) of a descriptor in it."""


class Manifest:
    """The tensors of several descriptors, ordered by name.

    Args:
        keys: keys of the descriptors of all trainer ranks.
        descriptors: the descriptors.

    Attributes:
        keys: keys of the descriptors.
        sources: each tensor once, in order of arrival.
        names: sorted names.
        index: position of each name in `names`.
        numel: number of elements of each name, at least 1, int64 [num_names].
        num_in_place: number of descriptors whose pieces are read in place.

    Raises:
        ValueError: trainer ranks disagree about a tensor, or do not send each of its elements exactly once.
    """

    def __init__(self, keys: Sequence[DescriptorKey], descriptors: Sequence[BucketDescriptor]) -> None:
        self.keys = tuple(keys)
        self.sources = _checked_sources(descriptors)
        self.names = sorted(source.name for source in self.sources)
        self.num_in_place = sum(bool(descriptor.memories) for descriptor in descriptors)
        self.numel = np.ones(len(self.names), dtype=np.int64)
        self.index = {name: i for i, name in enumerate(self.names)}
        self._where: dict[int, tuple[BucketDescriptor, NDArray[np.int64]]] = {}
        for source in self.sources:
            self.numel[self.index[source.name]] = max(1, Box.whole(source.shape).numel)

    def sum(self, descriptors: Sequence[BucketDescriptor], values: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Add up values of the descriptors' sources by name, one array per descriptor: int64 [num_names]."""
        total = np.zeros(len(self.names), dtype=np.int64)
        for descriptor, line_values in zip(descriptors, values, strict=True):
            if id(descriptor) not in self._where:  # keeps the descriptor alive, so that its id stays unique
                where = np.array([self.index[source.name] for source in descriptor.sources], dtype=np.int64)
                self._where[id(descriptor)] = descriptor, where
            total[self._where[id(descriptor)][1]] += line_values  # a descriptor has each source once
        return total


def _checked_sources(descriptors: Sequence[BucketDescriptor]) -> list[SourceSpec]:
    sources: dict[str, SourceSpec] = {}
    boxes: dict[str, list[Box]] = {}
    for descriptor in descriptors:
        for source, shards in zip(descriptor.sources, descriptor.shards, strict=True):
            if sources.setdefault(source.name, source) != source:
                raise ValueError(
                    f"trainer ranks disagree about {source.name!r}: {sources[source.name]} and {source}; all must pass "
                    f"the same global shape and dtype"
                )
            boxes.setdefault(source.name, []).extend(shard.box for shard in shards)
    for name, held in boxes.items():
        numel, count = Box.whole(sources[name].shape).numel, sum(box.numel for box in held)
        if count != numel or not are_disjoint(held):
            raise ValueError(
                f"{name!r} has {numel} elements, the trainer ranks send {count}"
                f"{'' if are_disjoint(held) else ', some twice'}; "
                f"each must be sent exactly once (for equal copies set LocalShard.replica and num_replicas)"
            )
    return list(sources.values())


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


class PlanCache:
    """A model, and what an engine rank keeps for it between updates.

    Args:
        model: model with a `load_weights` that takes (name, tensor) pairs. Its parameters may move between updates.
        may_ignore: returns whether a name that no parameter reads is expected.
        finish: called after the copies of each update.

    Attributes:
        memories: mappings of the trainer's memory.
        recorder: the plan, and the sources it was recorded for.
        checked: manifest that passed all checks last, its plan, and how many elements of each tensor are copied here.
        last_names: names of the tensors of the last update that loaded all parameters.
    """

    def __init__(self, model: nn.Module, may_ignore: Callable[[str], bool], finish: Callable[[], None]) -> None:
        self.model = model
        self.may_ignore = may_ignore
        self.finish = finish
        self.device = next(model.parameters()).device
        self.memories = MappedMemories(self.device)
        self.recorder = Recorder(model)
        self.checked: tuple[Manifest | None, CopyPlan, NDArray[np.int64]]
        self.checked = None, self.recorder.plan, np.zeros(0, np.int64)
        self.last_names: Sequence[str] = ()
        self._parsed: dict[DescriptorKey, BucketDescriptor] = {}
        self._bucket_copies: dict[DescriptorKey, BucketCopies] = {}
        self._joined: dict[tuple[DescriptorKey, ...], BucketCopies] = {}
        self._plan = self.recorder.plan  # plan of `_bucket_copies` and `_joined`
        self._manifest: Manifest | None = None
        self._modules = list(model.modules())
        self._layout = self._find_parameters()

    def manifest(self, keys: Sequence[DescriptorKey]) -> Manifest:
        """Return what these descriptors send in total; cached because the next update usually has the same
        descriptors.
        """
        if self._manifest is None or self._manifest.keys != tuple(keys):
            self._manifest = Manifest(keys, [self.descriptor(*key) for key in keys])
        return self._manifest

    def read_listing(self, box: Mailbox, listed: Place) -> list[Place]:
        """Return the places of an update's descriptors from its listing."""
        return listing_from_json(box.read_journal(listed))

    def descriptor(self, box: Mailbox, place: Place) -> BucketDescriptor:
        """Return a descriptor of a journal, parsed once. A text in a journal never changes."""
        key = (box, place)
        if key not in self._parsed:
            self._parsed[key] = descriptor_from_json(box.read_journal(place))
        return self._parsed[key]

    def bucket_copies(self, box: Mailbox, place: Place) -> BucketCopies:
        """Return the copies of a bucket for the current plan."""
        self._follow_plan()
        key = (box, place)
        if key not in self._bucket_copies:
            descriptor = self.descriptor(box, place)
            if box.remote_input is not None:
                descriptor = box.remote_input.pack(place, descriptor, self._plan)
            self._bucket_copies[key] = self._build(descriptor)
        return self._bucket_copies[key]

    def merged_copies(self, keys: tuple[DescriptorKey, ...]) -> BucketCopies:
        """Return one set of copies for buckets whose pieces are read in place.

        The parts of a tensor on several GPUs are then copied at about the same time, and no GPU has to serve all others
        at once.
        """
        if len(keys) == 1:
            return self.bucket_copies(*keys[0])
        self._follow_plan()
        if keys not in self._joined:
            self._joined[keys] = self._build(merge_descriptors([self.descriptor(*key) for key in keys]))
        return self._joined[keys]

    def arena(self, box: Mailbox, place: Place) -> Memory:
        return memory_from_json(box.read_journal(place))

    def _follow_plan(self) -> None:
        """Discard copies that were built for an earlier plan."""
        if self._plan is not self.recorder.plan:
            self._plan = self.recorder.plan
            self._bucket_copies.clear()
            self._joined.clear()

    def _build(self, descriptor: BucketDescriptor) -> BucketCopies:
        return BucketCopies(descriptor, self._plan, dict(self.model.named_parameters()), self.device)

    def follow_model(self) -> None:
        """Discard the plan if the parameters have moved since the last update."""
        layout = self._find_parameters()
        if layout != self._layout:
            self._layout = layout
            self.recorder.forget()

    def _find_parameters(self) -> list[tuple[object, ...]]:
        """Return identities, addresses, shapes and dtypes of the parameters."""
        # Reads the modules' registries directly: `named_parameters` takes milliseconds for a large model.
        parameters = [p for module in self._modules for p in module._parameters.values() if p is not None]
        return [(id(p), p.data_ptr(), p.shape, p.dtype) for p in parameters]

    def release_unused(self) -> None:
        """Close mappings that the last two updates did not use, and drop views of them."""
        if self.memories.close_unused():
            for bucket_copies in self._bucket_copies.values():
                bucket_copies.forget()

    def forget_box(self, box: Mailbox) -> None:
        """Discard what was read from a mailbox that is closed."""
        self._parsed = {key: descriptor for key, descriptor in self._parsed.items() if key[0] is not box}
        self._bucket_copies = {key: copies for key, copies in self._bucket_copies.items() if key[0] is not box}
        self._joined.clear()
        self._manifest = None
