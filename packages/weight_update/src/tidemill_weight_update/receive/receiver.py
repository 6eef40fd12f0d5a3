"""The engine's side of the fast path: one engine rank, which keeps its plan and tables between updates."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tidemill_weight_update.control.channel import Channel, Place
from tidemill_weight_update.control.descriptor import (
    BucketDescriptor,
    descriptor_from_json,
    listing_from_json,
    memory_from_json,
    merge_descriptors,
)
from tidemill_weight_update.control.mailbox import IDLE, MIXED, UNCHANGED, Mailbox
from tidemill_weight_update.control.request import Request
from tidemill_weight_update.memory.handle import Memory
from tidemill_weight_update.memory.mapped import MappedMemories
from tidemill_weight_update.plan.plan import CopyPlan
from tidemill_weight_update.plan.recorder import Recorder
from tidemill_weight_update.receive.bucket_copies import BucketCopies
from tidemill_weight_update.receive.manifest import DescriptorKey, Manifest
from tidemill_weight_update.receive.session import UpdateSession
from tidemill_weight_update.remote.engine_link import EngineLinks
from tidemill_weight_update.remote.group_link import LinkAddress

ALL_BUCKETS = 1 << 31
"""More buckets than any update has: nobody waits for a rank that acknowledged so many."""


class Receiver:
    """Loads what trainer ranks publish into a model.

    Args:
        model: with SGLang's `load_weights`. Between updates its parameters may move.
        rank, num_ranks: of this process in its engine, and of all of them.
        may_ignore: tells for a name that no parameter takes whether that is as it should be (`lm_head.weight` of a
            model with tied embeddings).
        finish: called after the copies of each update, to compute what the model derives from its parameters.

    Attributes:
        checked: what was sent when all was last found to be as it should be, the plan, and how many elements of each
            tensor are copied to this rank.
        last_names: of the tensors of the last update that loaded all parameters.
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
        self._mailboxes: dict[str, Channel] = {}
        self._parsed: dict[DescriptorKey, BucketDescriptor] = {}
        self._bucket_copies: dict[DescriptorKey, BucketCopies] = {}
        self._joined: dict[tuple[DescriptorKey, ...], BucketCopies] = {}
        self._plan = self.recorder.plan  # of `_bucket_copies` and `_joined`
        self._manifest: Manifest | None = None
        self._modules = list(model.modules())
        self._layout = self._find_parameters()

    def handle(self, request: Request) -> None:
        """Carries out one update. What goes wrong is reported to the trainer, not raised: it would end the engine.

        Raises:
            RuntimeError: nobody waits for a report: rank 0's mailbox cannot be opened, or is at another update.
        """
        for path in self._mailboxes.keys() - set(request.mailboxes):
            self._forget(path)
        self._links.keep(request.mailboxes)
        control = self._open(request.mailboxes[0], request.timeout_s)
        if not control.is_at(request.sequence):
            raise RuntimeError(f"the trainer gave up update {request.sequence} before this engine came to it")
        rank = min(self._rank, request.num_receivers - 1)
        row = request.first_receiver + rank
        boxes, turn = [control], None
        try:
            if self._num_ranks != request.num_receivers:
                raise ValueError(f"the engine has {self._num_ranks} ranks, its client said {request.num_receivers}")
            boxes = [control, *self._open_others(request)]
            turn = UpdateSession(self, request, boxes, rank)
            with torch.no_grad():
                self._follow_model()
                turn.run()
        except Exception as error:  # noqa: BLE001 - raised, it would end the engine
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
        """What these lines send in all; kept for the next update, which is likely to have the same lines."""
        if self._manifest is None or self._manifest.keys != tuple(keys):
            self._manifest = Manifest(keys, [self.descriptor(*key) for key in keys])
        return self._manifest

    def read_listing(self, box: Channel, listed: Place) -> list[Place]:
        """The lines of an update that lists them."""
        return listing_from_json(box.read_journal(listed))

    def descriptor(self, box: Channel, place: Place) -> BucketDescriptor:
        """A descriptor of a journal, parsed once. What stands at a place of a journal never changes."""
        key = (box, place)
        if key not in self._parsed:
            self._parsed[key] = descriptor_from_json(box.read_journal(place))
        return self._parsed[key]

    def bucket_copies(self, box: Channel, place: Place) -> BucketCopies:
        """The copies of a descriptor, for the present plan."""
        self._follow_plan()
        key = (box, place)
        if key not in self._bucket_copies:
            descriptor = self.descriptor(box, place)
            if box.remote_input is not None:
                descriptor = box.remote_input.pack(place, descriptor, self._plan)
            self._bucket_copies[key] = self._build(descriptor)
        return self._bucket_copies[key]

    def merged_copies(self, keys: tuple[DescriptorKey, ...]) -> BucketCopies:
        """The copies of lines whose pieces stay where they are, as one.

        The parts of a tensor that lie on several GPUs are then copied at about the same time, and no GPU has to serve
        all others at once.
        """
        if len(keys) == 1:
            return self.bucket_copies(*keys[0])
        self._follow_plan()
        if keys not in self._joined:
            self._joined[keys] = self._build(merge_descriptors([self.descriptor(*key) for key in keys]))
        return self._joined[keys]

    def arena(self, box: Channel, place: Place) -> Memory:
        return memory_from_json(box.read_journal(place))

    def _follow_plan(self) -> None:
        """Forgets the copies that were built on another plan than the present one."""
        if self._plan is not self.recorder.plan:
            self._plan = self.recorder.plan
            self._bucket_copies.clear()
            self._joined.clear()

    def _build(self, descriptor: BucketDescriptor) -> BucketCopies:
        return BucketCopies(descriptor, self._plan, dict(self.model.named_parameters()), self.device)

    def _follow_model(self) -> None:
        """Forgets what is known of the parameters if they lie elsewhere than at the last update."""
        layout = self._find_parameters()
        if layout != self._layout:
            self._layout = layout
            self.recorder.forget()

    def _find_parameters(self) -> list[tuple[object, ...]]:
        """Where the parameters are."""
        # Their registries are read directly: `named_parameters` takes milliseconds for a large model.
        parameters = [p for module in self._modules for p in module._parameters.values() if p is not None]
        return [(id(p), p.data_ptr(), p.shape, p.dtype) for p in parameters]

    def _open_others(self, request: Request) -> Iterator[Channel]:
        for rank, path in enumerate(request.mailboxes[1:], start=1):
            try:
                yield self._open(path, request.timeout_s)
            except RuntimeError as error:
                raise RuntimeError(f"trainer rank {rank}: {error}") from error

    def _open(self, path: str, timeout_s: float) -> Channel:
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
