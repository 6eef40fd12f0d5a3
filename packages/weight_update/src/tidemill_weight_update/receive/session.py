"""One update on one engine rank: check, copy, finish, verify, report."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill_weight_update.control.mailbox import ATTACHED, CHECKED, COPIED, LOADED, Mailbox, Place, fitting
from tidemill_weight_update.control.request import Request
from tidemill_weight_update.control.wait import PollingWait
from tidemill_weight_update.memory.handle import Memory
from tidemill_weight_update.receive.peers import Peers
from tidemill_weight_update.receive.plan_cache import BucketCopies, DescriptorKey, Manifest, PlanCache
from tidemill_weight_update.stages import Stages


class UpdateSession:
    """The state of one update on one engine rank.

    Attributes:
        peers: the ranks of this engine; this rank reports through it.
        changed: whether parameters may have been written to.
    """

    def __init__(self, receiver: PlanCache, request: Request, boxes: Sequence[Mailbox], rank: int) -> None:
        self._receiver = receiver
        self._request = request
        self._boxes = boxes
        # Not a method: a reference cycle would keep staged tensors and mappings until garbage collection.
        self.peers = Peers(boxes[0], request, rank, partial(_check_trainer, boxes, request.sequence))
        self.changed = False
        self._copied: list[tuple[tuple[DescriptorKey, ...], BucketCopies]] = []
        self._num_in_place = 0
        self._expected: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._staging: dict[str, Tensor] = {}
        self._stages = Stages()

    def run(self) -> None:
        """Run the update; raise on any error that the docstring of `WeightUpdater.update` lists."""
        try:
            self._run()
        except Exception:
            _check_alive(self._boxes)  # an exited trainer is the root cause of other errors
            raise
        finally:
            if self.changed:
                self._synchronize()  # the next report releases the trainer's memory

    def _run(self) -> None:
        self.peers.report(ATTACHED)
        with self._stages("wait"):
            if self._receiver.device.type == "cuda":  # a paused SGLang may still compute a token on another stream
                torch.cuda.synchronize(self._receiver.device)
            listed = [self._wait_until_open(box) for box in self._boxes]
        with self._stages("check"):
            manifest = self._prepare(listed) if self._request.complete else None
            self._receiver.recorder.begin(all_come=not self._request.partial)
            self.peers.report(CHECKED)
            self.peers.wait(CHECKED)
            if manifest is not None:
                self._reject_unused(manifest)
        self._copy(manifest)
        with self._stages("check"):
            if manifest is None:
                manifest = self._check_received()
        with self._stages("finish"):
            self._load_staged()
            self._receiver.finish()
            self._synchronize()
        with self._stages("verify"):
            num_unverified = self._compare(manifest)
        if not self._request.partial:
            self._receiver.last_names = manifest.names
        through = self._receiver.recorder.plan.through_loader
        self.peers.report(
            LOADED,
            through_loader=fitting({name: through[name] for name in self._staging}),
            num_unverified=num_unverified,
            seconds=self._stages.seconds,
        )

    # Before any parameter changes.

    def _wait_until_open(self, box: Mailbox) -> tuple[int, int] | None:
        wait = PollingWait(self._request.timeout_s, "the trainer to start the update", self.peers.check)
        while True:
            is_open, listed = box.listing(self._request.sequence)
            if is_open:
                return listed
            box.num_buckets(self._request.sequence)  # raises if the trainer has failed or started a later update
            wait.pause()

    def _prepare(self, listed: Sequence[tuple[int, int] | None]) -> Manifest:
        """Build and check the copies of all buckets, unless they are those of the last update."""
        receiver, recorder = self._receiver, self._receiver.recorder
        keys = [
            (box, place)
            for box, where in zip(self._boxes, listed, strict=True)
            if where is not None
            for place in receiver.read_listing(box, where)
        ]
        manifest = receiver.manifest(keys)
        checked, plan, counts = receiver.checked
        if checked is not manifest or plan is not recorder.plan:
            recorder.cover(manifest.sources)
            self._check_dtypes()
            bucket_copies = [receiver.bucket_copies(*key) for key in keys]
            counts = manifest.sum([each.descriptor for each in bucket_copies], [each.counts for each in bucket_copies])
            receiver.checked = manifest, recorder.plan, counts
        self._check_coverage(manifest)
        self._num_in_place = manifest.num_in_place
        self.peers.share_totals(np.zeros_like(counts), counts)
        return manifest

    def _check_dtypes(self) -> None:
        """Raise ValueError for casts that loading would do silently: between integers and floats, and of quantized
        values without their scale.
        """
        recorder = self._receiver.recorder
        wrong = {name: recorder.plan.through_loader[name] for name in recorder.plan.converted}
        for copy in recorder.plan.copies:
            sent = recorder.sources[copy.name].dtype
            if sent.itemsize == 1 and sent.is_floating_point and copy.dtype.itemsize > 1:
                wrong[copy.name] = f"it is cast from {sent} to {copy.dtype} without its scale"
        if wrong:
            message = _first_few([f"{name!r} has the wrong dtype: {why}" for name, why in wrong.items()])
            raise ValueError(f"{message}; send it in the dtype of its parameter")

    def _check_coverage(self, manifest: Manifest) -> None:
        plan = self._receiver.recorder.plan
        if not plan.uncovered or self._request.partial:
            return
        missing = [f"{name!r} ({count} elements)" for name, count in plan.uncovered.items()]
        message = f"no tensor was sent for these parameters of the engine: {_first_few(missing)}"
        if gone := [repr(name) for name in self._receiver.last_names if name not in manifest.index]:
            message += f"; tensors of the last complete update that are missing now: {_first_few(gone)}"
        raise ValueError(message)

    def _reject_unused(self, manifest: Manifest) -> None:
        _, counts = self.peers.sum_totals(len(manifest.names))
        unused = [manifest.names[i] for i in np.flatnonzero(counts == 0)]
        unused = [repr(name) for name in unused if not self._receiver.may_ignore(name)]
        if unused:
            raise ValueError(
                f"the engine's model has no parameter for these tensors: {_first_few(unused)}; check the names against "
                f"the engine's checkpoint, or do not send them"
            )
        # SGLang's sharded layers silently ignore what exceeds their own shape.
        cut = [
            f"{manifest.names[i]!r} ({counts[i]} of {manifest.numel[i]} elements)"
            for i in np.flatnonzero((counts > 0) & (counts < manifest.numel))
        ]
        if cut:
            raise ValueError(
                f"the engine's model reads only a part of these tensors: {_first_few(cut)}; send them in the shapes of "
                f"the engine's checkpoint"
            )

    # The copies.

    def _copy(self, manifest: Manifest | None) -> None:
        """Copy the buckets of all trainer ranks as they arrive."""
        # Each rank starts with another trainer rank, so that over a link no trainer rank serves all at once.
        num_boxes = len(self._boxes)
        pending = {(index + self.peers.row) % num_boxes: 0 for index in range(num_boxes)}
        wait = PollingWait(self._request.timeout_s, "the trainer's next bucket", self.peers.check)
        while pending:
            ready: dict[int, tuple[Place, Place | None]] = {}
            for index, bucket in list(pending.items()):
                announced = self._boxes[index].announced(self._request.sequence, bucket)
                if announced is not None:
                    ready[index] = announced
                elif self._boxes[index].num_buckets(self._request.sequence) == bucket:
                    del pending[index]
            in_place = tuple((self._boxes[index], place) for index, (place, arena) in ready.items() if arena is None)
            if 0 < len(in_place) < self._num_in_place:  # buckets read in place are copied together
                ready = {index: announced for index, announced in ready.items() if announced[1] is not None}
                in_place = ()
            if not ready:
                with self._stages("wait"):
                    wait.pause()
                continue
            with self._stages("copy"):
                if in_place:
                    self._run_copies(in_place, self._receiver.merged_copies(in_place), None)
                for index, (place, arena) in ready.items():
                    if arena is not None:
                        self._copy_bucket(self._boxes[index], pending[index], place, arena)
                if manifest is not None and sum(len(keys) for keys, _ in self._copied) == len(manifest.keys):
                    self._expected = self._expect(manifest)  # while a GPU copies the last of them
                self._synchronize()
            for index in ready:
                pending[index] += 1
                self._boxes[index].acknowledge(self._request.sequence, self.peers.row, pending[index])
            wait.progress()

    def _copy_bucket(self, box: Mailbox, bucket: int, place: Place, arena: Place) -> None:
        receiver = self._receiver
        if not self._request.complete:
            receiver.recorder.extend(receiver.descriptor(box, place).sources)
        bucket_copies = receiver.bucket_copies(box, place)
        memory: Memory | Tensor = receiver.arena(box, arena)
        if box.remote_input is not None:
            at = self._request.sequence, self.peers.row, bucket, place
            memory = box.remote_input.receive(*at, memory, self.peers.check)
        self._run_copies(((box, place),), bucket_copies, memory)

    def _run_copies(
        self, keys: tuple[DescriptorKey, ...], bucket_copies: BucketCopies, memory: Memory | Tensor | None
    ) -> None:
        for source in bucket_copies.staged:
            if source.name not in self._staging:
                staged = torch.empty(source.shape, dtype=source.dtype, device=self._receiver.device)
                self._staging[source.name] = staged
        self.changed = True
        self._receiver.recorder.write_fills()
        bucket_copies.run(memory, self._receiver.memories, self._staging)
        self._copied.append((keys, bucket_copies))

    def _check_received(self) -> Manifest:
        """Run the checks of `_prepare` for a stream, whose tensors are known only after the copies."""
        recorder = self._receiver.recorder
        manifest = self._receiver.manifest([key for keys, _ in self._copied for key in keys])
        # Tensors of earlier updates only count if they keep their values.
        recorder.record_all(list(recorder.sources.values()) if self._request.partial else manifest.sources)
        self._check_dtypes()
        self._check_coverage(manifest)
        self._check_split_modules(manifest)
        return manifest

    def _check_split_modules(self, manifest: Manifest) -> None:
        """Raise ValueError if the model combines tensors that arrived in different parts of the stream: they were not
        loaded correctly.
        """
        descriptors = [bucket_copies.descriptor for _, bucket_copies in self._copied]
        copied = manifest.sum(descriptors, [bucket_copies.counts for _, bucket_copies in self._copied])
        plan = self._receiver.recorder.plan
        wanted: Counter[str] = Counter()
        for copy in plan.copies:
            wanted[copy.name] += copy.box.numel
        apart = [
            repr(name)
            for name, count in zip(manifest.names, copied.tolist(), strict=True)
            if (name in self._staging) != (name in plan.through_loader)
            or (name not in self._staging and count != wanted[name])
        ]
        if apart:
            self._receiver.recorder.forget()  # the constants of these parameters were not written
            raise ValueError(
                f"the model combines these tensors with others from another part of the stream: "
                f"{_first_few(apart)}; pass a collection instead of a generator, or increase bucket_bytes"
            )

    def _load_staged(self) -> None:
        if self._staging:
            order = [name for name in self._receiver.recorder.sources if name in self._staging]
            self._receiver.model.load_weights([(name, self._staging[name]) for name in order])  # type: ignore[operator]

    # After the copies.

    def _compare(self, manifest: Manifest) -> int:
        """Compare checksums with the other ranks and the trainer; see `_verify`."""
        counts, sent = self._expected or self._expect(manifest)
        descriptors = [bucket_copies.descriptor for _, bucket_copies in self._copied]
        checksums = [bucket_copies.sums.checksums_on_host() for _, bucket_copies in self._copied]
        self.peers.share_totals(manifest.sum(descriptors, checksums), counts)
        self.peers.report(COPIED)
        self.peers.wait(COPIED)
        if not self._request.complete:
            self._reject_unused(manifest)
        return self._verify(manifest, sent)

    def _expect(self, manifest: Manifest) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each tensor how many elements its buckets bring to this rank, and the checksum of what
        was sent.
        """
        copied = [bucket_copies for _, bucket_copies in self._copied]
        counts = manifest.sum([each.descriptor for each in copied], [each.counts for each in copied])
        descriptors = [self._receiver.descriptor(*key) for key in manifest.keys]
        boxes = [box for box, _ in manifest.keys]
        sent = [
            box.sent(descriptor.first_checksum, len(descriptor.sources))
            for box, descriptor in zip(boxes, descriptors, strict=True)
        ]
        return counts, manifest.sum(descriptors, sent)

    def _verify(self, manifest: Manifest, sent: NDArray[np.int64]) -> int:
        """Compare what all ranks copied with what the trainer sent; return the number of tensors that could not be
        compared.

        A tensor can be compared if each element was copied equally often (once, or once per replica). Tensors that the
        model's own loader writes cannot be compared.

        Raises:
            RuntimeError: a tensor arrived with other values than were sent.
        """
        checksums, counts = self.peers.sum_totals(len(manifest.names))
        comparable = counts % manifest.numel == 0
        wrong = comparable & (checksums != sent * (counts // manifest.numel))
        if wrong.any():
            names = [repr(manifest.names[i]) for i in np.flatnonzero(wrong)]
            raise RuntimeError(
                f"checksum mismatch: these tensors did not arrive as they were sent: {_first_few(names)}; they must "
                f"not change during the update"
            )
        through = self._receiver.recorder.plan.through_loader
        comparable[[manifest.index[name] for name in through if name in manifest.index]] = False
        return int((~comparable).sum())

    def _synchronize(self) -> None:
        if self._receiver.device.type == "cuda":
            torch.cuda.current_stream(self._receiver.device).synchronize()


def _check_trainer(boxes: Sequence[Mailbox], sequence: int) -> None:
    _check_alive(boxes)
    for box in boxes:
        box.num_buckets(sequence)


def _check_alive(boxes: Sequence[Mailbox]) -> None:
    exited = [f"{rank} (process {box.owner_pid})" for rank, box in enumerate(boxes) if box.owner_has_exited()]
    if exited:  # list all of them: the first may have caused the others to exit
        raise RuntimeError(f"trainer rank {', '.join(exited)} has exited; see the trainer's log")


def _first_few(items: Sequence[str]) -> str:
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")
