"""One engine rank on the fast path: caches its plan and copy tables between updates, and handles requests."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tidemill_weight_update.control.descriptor import (
    BucketDescriptor,
    descriptor_from_json,
    listing_from_json,
    memory_from_json,
    merge_descriptors,
)
from tidemill_weight_update.control.mailbox import IDLE, MIXED, UNCHANGED, Mailbox, Place
from tidemill_weight_update.control.request import Request
from tidemill_weight_update.memory.handle import Memory
from tidemill_weight_update.memory.mapped import MappedMemories
from tidemill_weight_update.plan.plan import CopyPlan
from tidemill_weight_update.plan.record import Recorder
from tidemill_weight_update.receive.bucket_copies import BucketCopies
from tidemill_weight_update.receive.manifest import DescriptorKey, Manifest
from tidemill_weight_update.receive.session import UpdateSession
from tidemill_weight_update.remote.engine_link import EngineLinks
from tidemill_weight_update.remote.group_link import LinkAddress

ALL_BUCKETS = 1 << 31
"""More buckets than any update has: acknowledging this many releases the trainer from waiting for this rank."""


class Receiver:
    """Loads what trainer ranks publish into a model.

    Args:
        model: model with a `load_weights` that takes (name, tensor) pairs. Its parameters may move between updates.
        rank: rank of this process in its engine.
        num_ranks: number of ranks of the engine.
        may_ignore: returns whether a name that no parameter reads is expected (`lm_head.weight` of a model with tied
            embeddings).
        finish: called after the copies of each update, to recompute what the model derives from its parameters.

    Attributes:
        checked: manifest that passed all checks last, its plan, and how many elements of each tensor are copied here.
        last_names: names of the tensors of the last update that loaded all parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        num_ranks: int,
        may_ignore: Callable[[str], bool],
        finish: Callable[[], None],
    ) -> None:
        self.model = model
        self.may_ignore = may_ignore
        self.finish = finish
        self.device = next(model.parameters()).device
        self.memories = MappedMemories(self.device)
        self.recorder = Recorder(model)
        self.checked: tuple[Manifest | None, CopyPlan, NDArray[np.int64]]
        self.checked = None, self.recorder.plan, np.zeros(0, np.int64)
        self.last_names: Sequence[str] = ()
        self._rank = rank
        self._num_ranks = num_ranks
        self._links = EngineLinks(self.device)
        self._mailboxes: dict[str, Mailbox] = {}
        self._parsed: dict[DescriptorKey, BucketDescriptor] = {}
        self._bucket_copies: dict[DescriptorKey, BucketCopies] = {}
        self._joined: dict[tuple[DescriptorKey, ...], BucketCopies] = {}
        self._plan = self.recorder.plan  # plan of `_bucket_copies` and `_joined`
        self._manifest: Manifest | None = None
        self._modules = list(model.modules())
        self._layout = self._find_parameters()

    def handle(self, request: Request) -> None:
        """Process one update. Errors are reported to the trainer instead of raised: an exception would crash the
        engine.

        Raises:
            RuntimeError: nobody waits for a report, because the mailbox of rank 0 cannot be opened or is at another
                update.
        """
        for path in self._mailboxes.keys() - set(request.mailboxes):
            self._forget(path)
        self._links.keep(request.mailboxes)
        control = self._open(request.mailboxes[0], request.timeout_s)
        if not control.is_at(request.sequence):
            raise RuntimeError(
                f"the trainer cancelled update {request.sequence} before this engine started it; see the error of "
                f"update() in the trainer's log"
            )
        rank = min(self._rank, request.num_receivers - 1)
        row = request.first_receiver + rank
        boxes, turn = [control], None
        try:
            if self._num_ranks != request.num_receivers:
                raise ValueError(
                    f"the engine has {self._num_ranks} ranks, but its client reported tp_size="
                    f"{request.num_receivers}; fix the client's tp_size"
                )
            boxes = [control, *self._open_others(request)]
            turn = UpdateSession(self, request, boxes, rank)
            with torch.no_grad():
                self._follow_model()
                turn.run()
        except Exception as error:  # noqa: BLE001 - raising would crash the engine
            state = MIXED if turn is not None and turn.changed else UNCHANGED
            reply = {
                "error": f"{type(error).__name__}: {error}",
                "reached": IDLE if turn is None else turn.peers.reached,
            }
            if control.is_at(request.sequence):
                control.report(request.sequence, row, state, reply)
        finally:
            if self.memories.close_unused():
                for bucket_copies in self._bucket_copies.values():
                    bucket_copies.forget()
            for box in [box for box in boxes if box.is_at(request.sequence)]:
                box.acknowledge(request.sequence, row, ALL_BUCKETS)

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

    def _follow_model(self) -> None:
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

    def _open_others(self, request: Request) -> Iterator[Mailbox]:
        for rank, path in enumerate(request.mailboxes[1:], start=1):
            try:
                yield self._open(path, request.timeout_s)
            except RuntimeError as error:
                raise RuntimeError(f"trainer rank {rank}: {error}") from error

    def _open(self, path: str, timeout_s: float) -> Mailbox:
        if path in self._mailboxes and not self._mailboxes[path].is_current():
            self._forget(path)
        if path not in self._mailboxes:
            is_far = LinkAddress.is_path(path)
            self._mailboxes[path] = self._links.open(path, timeout_s) if is_far else Mailbox.open(path)
        return self._mailboxes[path]

    def _forget(self, path: str) -> None:
        box = self._mailboxes.pop(path)
        self._parsed = {key: descriptor for key, descriptor in self._parsed.items() if key[0] is not box}
        self._bucket_copies = {key: descriptor for key, descriptor in self._bucket_copies.items() if key[0] is not box}
        self._joined.clear()
        self._manifest = None
        box.close()
