"""What an engine rank keeps between updates: the trainer's declaration, the plan, and copies built from both."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tidemill_weight_update.collector import paused_collector
from tidemill_weight_update.control.descriptor import BucketDescriptor, declaration_from_json, merge_descriptors
from tidemill_weight_update.control.mailbox import Mailbox
from tidemill_weight_update.copy.checksum import TensorSums
from tidemill_weight_update.copy.copier import Blocks, Copier
from tidemill_weight_update.copy.table import Copy, CopyTable, build_tables
from tidemill_weight_update.copy.tiles import interleave
from tidemill_weight_update.cuda_memory import DeviceMemory
from tidemill_weight_update.memory import MappedMemories, Memory
from tidemill_weight_update.plan.plan import CopyPlan, Fill, StoredPlans
from tidemill_weight_update.plan.record import record
from tidemill_weight_update.remote.engine_link import RemoteMailbox
from tidemill_weight_update.tensors import Box, SourceSpec, are_disjoint, contiguous_strides


class Manifest:
    """All tensors that the trainer ranks declared.

    Attributes:
        declared: descriptors of each trainer rank.
        descriptors: all of them, in rank order.
        sources: each tensor once, in order of declaration.
        names: their names.
        index: position of each name in `sources`.
        numel: number of elements of each tensor, at least 1, int64 [num_tensors].
    """

    def __init__(self, declared: Sequence[Sequence[BucketDescriptor]]) -> None:
        self.declared = declared
        self.descriptors = [descriptor for of_rank in declared for descriptor in of_rank]
        self.sources = _checked_sources(declared)
        self.names = [source.name for source in self.sources]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.numel = np.array([max(1, Box.whole(source.shape).numel) for source in self.sources], np.int64)

    def positions(self, sources: Sequence[SourceSpec]) -> NDArray[np.int64]:
        return np.array([self.index[source.name] for source in sources], dtype=np.int64)


def _checked_sources(declared: Sequence[Sequence[BucketDescriptor]]) -> list[SourceSpec]:
    sources: dict[str, SourceSpec] = {}
    boxes: dict[str, list[Box]] = {}
    for descriptor in (each for of_rank in declared for each in of_rank):
        for source, shards in zip(descriptor.sources, descriptor.shards, strict=True):
            if (first := sources.setdefault(source.name, source)) != source:
                ranks = {other: rank for rank, other, _ in reversed(_of_ranks(declared, source.name))}
                raise ValueError(
                    f"trainer ranks disagree about {source.name!r}: rank {ranks[first]} passes {first}, rank "
                    f"{ranks[source]} {source}; all must pass the same global shape and dtype"
                )
            boxes.setdefault(source.name, []).extend(shard.box for shard in shards)
    for name, held in boxes.items():
        numel, count = Box.whole(sources[name].shape).numel, sum(box.numel for box in held)
        if count != numel or not are_disjoint(held):
            parts = ", ".join(f"rank {rank}: {part}" for rank, _, part in _of_ranks(declared, name))
            raise ValueError(
                f"{name!r} has {numel} elements, the trainer ranks send {count}"
                f"{'' if are_disjoint(held) else ', some twice'} ({parts}); "
                f"each must be sent exactly once (for equal copies set LocalShard.replica and num_replicas)"
            )
    return list(sources.values())


def _of_ranks(declared: Sequence[Sequence[BucketDescriptor]], name: str) -> list[tuple[int, SourceSpec, int]]:
    """Return the ranks that declare a tensor, what they declare, and the number of elements that they send."""
    return [
        (rank, source, sum(shard.box.numel for shard in shards))
        for rank, of_rank in enumerate(declared)
        for descriptor in of_rank
        for source, shards in zip(descriptor.sources, descriptor.shards, strict=True)
        if source.name == name
    ]


class BucketCopies:
    """Built once for a bucket descriptor and a plan, run at each update.

    Args:
        descriptor: descriptor of the bucket; without memories if its bytes are received.

    Attributes:
        memories: those that are read; `map` them before the first run.
        counts: number of elements of each source that are copied here, int64 [num_sources].
        sums: checksums of the sources, as the last run read them.
    """

    def __init__(
        self, descriptor: BucketDescriptor, plan: CopyPlan, parameters: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.sources = descriptor.sources
        self._device = device
        shards = {source.name: shards for source, shards in zip(descriptor.sources, descriptor.shards, strict=True)}
        copies = [copy for copy in plan.copies if copy.name in shards]
        staged = [
            Copy(s.name, Box.whole(s.shape), f"staged {s.name}", 0, contiguous_strides(s.shape), s.dtype)
            for s in descriptor.sources
            if s.name in plan.through_loader
        ]
        copies += staged
        self._targets = tuple(dict.fromkeys(copy.parameter for copy in copies))
        self._tables, self.memories = _read_evenly(
            build_tables(copies, descriptor.sources, shards, self._targets), descriptor
        )
        self._parameters = {name: parameters[name].detach() for name in self._targets if name in parameters}
        self.counts = np.zeros(len(descriptor.sources), np.int64)
        for table in self._tables:
            np.add.at(self.counts, table.tensor, table.rows * table.cols)
        self.sums = TensorSums(len(descriptor.sources), device, finds_non_finite=False)
        self._blocks: Blocks = []
        # If parameters move, a new plan is recorded and a new object of this class reads their addresses.
        self._places: Blocks = [] if staged else self._found({})
        self._copier = Copier(self._tables, device, keeps=not staged)

    def map(self, mapped: MappedMemories) -> None:
        """Map `memories`, unless another bucket has."""
        self._blocks = [mapped.block(memory) for memory in self.memories]  # type: ignore[assignment]

    def run(self, received: Tensor | None, staging: Mapping[str, Tensor]) -> None:
        """Copy, and compute the checksums of what is copied. On a GPU the work is queued on the current stream.

        Args:
            received: memory of this process that holds the bucket, uint8; None: the descriptor's memories hold it.
            staging: source name -> tensor that receives a staged source.
        """
        self.sums.clear()
        if self._tables:
            blocks = self._blocks if received is None else [received]
            self._copier.run(blocks, self._places or self._found(staging), self.sums.checksums)
        self.sums.fetch()

    def _found(self, staging: Mapping[str, Tensor]) -> Blocks:
        staged = {f"staged {name}": tensor for name, tensor in staging.items()}
        places = [self._parameters[name] if name in self._parameters else staged[name] for name in self._targets]
        return [place.data_ptr() for place in places] if self._device.type == "cuda" else places


def _read_evenly(
    tables: Sequence[CopyTable], descriptor: BucketDescriptor
) -> tuple[Sequence[CopyTable], Sequence[Memory]]:
    """Return the tables and the memories that they read; if in place, in an order that reads from all GPUs evenly."""
    if not descriptor.is_in_place:
        return tables, descriptor.memories
    read = np.unique([number for table in tables for number in np.unique(table.memory)]).astype(np.int32)
    memories = [descriptor.memories[number] for number in read]
    tables = [replace(table, memory=np.searchsorted(read, table.memory).astype(np.int32)) for table in tables]
    uuids = [memory.device_uuid for memory in memories if isinstance(memory, DeviceMemory)]
    gpus = {uuid: number for number, uuid in enumerate(uuids)}
    origin = np.array([gpus[uuid] for uuid in uuids], np.int64)
    return [interleave(table, origin) for table in tables], memories


def write_fills(parameters: Mapping[str, Tensor], fills: Iterable[Fill]) -> None:
    """Write the constants of a plan to the model's `parameters`. Required before any copy."""
    for fill in fills:
        data = parameters[fill.parameter].detach()
        data.as_strided(fill.shape, fill.strides, data.storage_offset() + fill.offset).fill_(fill.value)


class Copies:
    """The copies of all buckets of a declaration, for one plan.

    Attributes:
        in_place: copies of all buckets that are read in place, None if there are none. Together, the parts of a tensor
            on several GPUs are copied at about the same time, and no GPU has to serve all others at once.
        in_arena: copies of the other buckets of each trainer rank, by number.
        counts: number of elements of each tensor that are copied here, int64 [num_tensors].
    """

    def __init__(
        self, manifest: Manifest, boxes: Sequence[Mailbox], plan: CopyPlan, model: nn.Module, mapped: MappedMemories
    ) -> None:
        self.manifest = manifest
        self.plan = plan
        self.parameters = dict(model.named_parameters())
        device = next(model.parameters()).device
        build = partial(BucketCopies, plan=plan, parameters=self.parameters, device=device)
        in_place = [descriptor for descriptor in manifest.descriptors if descriptor.is_in_place]
        self.num_in_place = len(in_place)
        self.in_place = build(merge_descriptors(in_place)) if in_place else None
        self.in_arena: list[dict[int, BucketCopies]] = []
        for box, descriptors in zip(boxes, manifest.declared, strict=True):
            arena = {number: each for number, each in enumerate(descriptors) if not each.is_in_place}
            if isinstance(box, RemoteMailbox):
                arena = {number: box.pack(number, each, plan) for number, each in arena.items()}
            self.in_arena.append({number: build(each) for number, each in arena.items()})
        self.all = [copies for of_rank in self.in_arena for copies in of_rank.values()]
        self.all += [] if self.in_place is None else [self.in_place]
        for copies in self.all:
            copies.map(mapped)
        self._where = [manifest.positions(copies.sources) for copies in self.all]
        self._where_sent = [manifest.positions(descriptor.sources) for descriptor in manifest.descriptors]
        self.counts = self._sum(self._where, [copies.counts for copies in self.all])

    def checksums(self) -> NDArray[np.int64]:
        """Return the checksum of each tensor as the last run read it: int64 [num_tensors]."""
        return self._sum(self._where, [copies.sums.checksums_on_host() for copies in self.all])

    def sent(self, boxes: Sequence[Mailbox]) -> NDArray[np.int64]:
        """Return the checksum of each tensor as the trainer ranks sent it: int64 [num_tensors]."""
        sent = [
            box.sent(descriptor.first_checksum, len(descriptor.sources))
            for box, descriptors in zip(boxes, self.manifest.declared, strict=True)
            for descriptor in descriptors
        ]
        return self._sum(self._where_sent, sent)

    def _sum(self, where: Sequence[NDArray[np.int64]], values: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        total = np.zeros(len(self.manifest.names), dtype=np.int64)
        for positions, of_bucket in zip(where, values, strict=True):
            total[positions] += of_bucket  # a bucket has each source once
        return total


class PlanCache:
    """A model, and what an engine rank keeps for it between updates.

    Attributes:
        last_names: names of the tensors of the last update that loaded all parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        may_ignore: Callable[[str], bool],
        finish: Callable[[], None],
        stored: StoredPlans | None,
    ) -> None:
        self.model = model
        self.may_ignore = may_ignore
        self.finish = finish
        self.device = next(model.parameters()).device
        self.last_names: Sequence[str] = ()
        self._memories = MappedMemories(self.device)
        self._declared: tuple[tuple[Mailbox, int], ...] = ()
        self._manifest: Manifest | None = None
        self._stored = stored
        self._plan = CopyPlan(copies=())
        self._planned: dict[str, SourceSpec] = {}
        self._copies: Copies | None = None
        self._modules = list(model.modules())
        self._layout = self._find_parameters()

    def manifest(self, boxes: Sequence[Mailbox], numbers: Sequence[int]) -> Manifest:
        """Return what the trainer ranks declared, read again if a number is not that of the last update."""
        declared = tuple(zip(boxes, numbers, strict=True))
        if self._manifest is None or self._declared != declared:
            self._manifest = self._copies = None
            with paused_collector():
                self._manifest = Manifest([declaration_from_json(box.read_declaration()) for box in boxes])
            self._declared = declared
            self._memories.keep(memory for each in self._manifest.descriptors for memory in each.memories)
        return self._manifest

    def copies(self, boxes: Sequence[Mailbox], manifest: Manifest) -> Copies:
        """Return the copies of a declaration for the plan of its tensors, which is recorded if it has changed."""
        if self._copies is None:
            with paused_collector():
                sources = {source.name: source for source in manifest.sources}
                if sources != self._planned:  # recorded as a whole, so that its coverage is exact
                    new = partial(record, self.model, manifest.sources)
                    self._plan = new() if self._stored is None else self._stored.get(manifest.sources, new)
                    self._planned = sources
                _check_dtypes(self._plan, sources)
                self._copies = Copies(manifest, boxes, self._plan, self.model, self._memories)
        return self._copies

    def follow_model(self) -> None:
        """Discard the plan if the parameters have moved since the last update."""
        layout = self._find_parameters()
        if layout != self._layout:
            self._layout = layout
            self._copies, self._planned = None, {}

    def _find_parameters(self) -> list[tuple[object, ...]]:
        """Return identities, addresses, shapes and dtypes of the parameters."""
        # Reads the modules' registries directly: `named_parameters` takes milliseconds for a large model.
        parameters = [p for module in self._modules for p in module._parameters.values() if p is not None]
        return [(id(p), p.data_ptr(), p.shape, p.dtype) for p in parameters]


def _check_dtypes(plan: CopyPlan, sources: Mapping[str, SourceSpec]) -> None:
    """Raise ValueError for casts that loading would do silently: between integers and floats, and of quantized values
    without their scale.
    """
    wrong = {name: plan.through_loader[name] for name in plan.converted}
    for copy in plan.copies:
        sent = sources[copy.name].dtype
        if sent.itemsize == 1 and sent.is_floating_point and copy.dtype.itemsize > 1:
            wrong[copy.name] = f"it is cast from {sent} to {copy.dtype} without its scale"
    if wrong:
        message = first_few([f"{name!r} has the wrong dtype: {why}" for name, why in wrong.items()])
        raise ValueError(f"{message}; send it in the dtype of its parameter")


def first_few(items: Sequence[str]) -> str:
    """Return the first items of a message, and the number of the others."""
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")
