"""One update on one engine rank: check, copy, finish, verify, report."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill_weight_update.control.board import PollingWait
from tidemill_weight_update.control.descriptor import Request
from tidemill_weight_update.control.mailbox import ATTACHED, CHECKED, COPIED, IDLE, LOADED, MIXED, UNCHANGED, Mailbox
from tidemill_weight_update.receive.plan_cache import Copies, Manifest, PlanCache, first_few, write_fills
from tidemill_weight_update.remote.engine_link import RemoteMailbox
from tidemill_weight_update.stats import Stages

MAX_NAMES = 200
"""Names in `through_loader` of a report, of which the others are omitted."""


class Peers:
    """The view that the engine rank in `row` has of the trainer ranks, and of the ranks of its own engine."""

    def __init__(self, boxes: Sequence[Mailbox], request: Request, row: int) -> None:
        self._boxes = boxes
        self._control = boxes[0]
        self._sequence = request.sequence
        self._rows = range(request.first_receiver, request.first_receiver + request.num_receivers)
        self._timeout_s = request.timeout_s
        self.row = row

    def report(self, state: int, **reply: Any) -> None:
        """Publish this rank's state, unless the trainer is already in a later update.

        Raises:
            RuntimeError: the trainer has excluded this rank. It excludes a rank before it reads its state, and this
                method writes the state before it checks: so a rank that the trainer regards as not started never
                starts.
        """
        if self._control.is_at(self._sequence):
            self._control.report(self._sequence, self.row, state, reply)
        self._check_own_row()

    def check(self) -> None:
        """Raise RuntimeError if a trainer rank has exited or failed, or rank 0 has excluded this rank."""
        self.check_alive()
        for box in self._boxes:
            box.published(self._sequence)
        self._check_own_row()

    def check_alive(self) -> None:
        """Raise RuntimeError if trainer ranks have exited."""
        exited = [f"{rank} (process {box.owner[0]})" for rank, box in enumerate(self._boxes) if box.owner_has_exited()]
        if exited:  # list all of them: the first may have caused the others to exit
            raise RuntimeError(f"trainer rank {', '.join(exited)} has exited; see the trainer's log")

    def exchange(
        self, state: int, checksums: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Report `state` with the checksum (modulo 2**64) and element count of each tensor on this rank; return their
        sums over all ranks of this engine once all have reached `state`.
        """
        self.check()
        self._control.write_totals(self.row, checksums, counts)
        self.report(state)
        self._wait(state)
        sums = np.zeros_like(checksums), np.zeros_like(counts)
        for row in self._rows:
            for total, values in zip(sums, self._control.totals(row, len(counts)), strict=True):
                np.add(total, values, out=total)
        return sums

    def _wait(self, state: int) -> None:
        """Return when all ranks have reached `state`, also if one of them failed after it."""
        pending = set(self._rows) - {self.row}
        wait = PollingWait(self._timeout_s, "the other ranks of this engine", lambda: self._check(pending))
        while pending:
            for row in list(pending):
                reached = self._control.state(self._sequence, row)
                if reached in (UNCHANGED, MIXED) and self._control.reply(row).get("reached", IDLE) < state:
                    raise RuntimeError(f"rank {row - self._rows[0]} of this engine failed; see the error of that rank")
                if reached >= state:
                    pending.remove(row)
                    wait.progress()
            if pending:
                wait.pause()

    def _check_own_row(self) -> None:
        if self._control.is_excluded(self._sequence, self.row):
            raise RuntimeError(
                "the trainer excluded this rank: it made no progress within timeout_s of WeightUpdater (including the "
                "wait for running requests), or its client got no response in time"
            )

    def _check(self, pending: set[int]) -> None:
        self.check()
        for row in pending:
            rank = row - self._rows[0]
            if (pid := self._control.exited_receiver(self._sequence, row)) is not None:
                raise RuntimeError(
                    f"rank {rank} of this engine (process {pid}) has exited; see the SGLang log of that rank"
                )
            if self._control.is_excluded(self._sequence, row):
                raise RuntimeError(f"rank {rank} of this engine made no progress; the trainer excluded it")


class UpdateSession:
    """The state of one update on one engine rank.

    Attributes:
        changed: whether parameters may have been written to.
    """

    def __init__(self, receiver: PlanCache, request: Request, boxes: Sequence[Mailbox], row: int) -> None:
        self._receiver = receiver
        self._request = request
        self._boxes = boxes
        self.peers = Peers(boxes, request, row)
        self.changed = False
        self._staging: dict[str, Tensor] = {}
        self._stages = Stages()

    def run(self) -> None:
        """Run the update; raise on any error that the docstring of `WeightUpdater.update` lists."""
        try:
            self._run()
        except Exception:
            self.peers.check_alive()  # an exited trainer is the root cause of other errors
            raise
        finally:
            if self.changed:
                self._synchronize()  # the next report releases the trainer's memory

    def _run(self) -> None:
        self.peers.report(ATTACHED)
        with self._stages("wait"):
            if self._receiver.device.type == "cuda":
                from tidemill_weight_update.copy.cuda import load_kernel

                load_kernel(self._receiver.device)  # while the trainer writes its declaration
                # A paused SGLang may still compute a token on another stream.
                torch.cuda.synchronize(self._receiver.device)
            numbers = [self._wait_until_open(box) for box in self._boxes]
        with self._stages("declaration"):
            manifest = self._receiver.manifest(self._boxes, numbers)
        with self._stages("plan"):
            copies = self._receiver.copies(self._boxes, manifest)
        with self._stages("check"):
            self._check_coverage(copies)
            _, counts = self.peers.exchange(CHECKED, np.zeros_like(copies.counts), copies.counts)
            self._reject_unused(manifest, counts)
        sent = self._copy(copies)
        with self._stages("finish"):
            if self._staging:
                self._receiver.model.load_weights(list(self._staging.items()))  # type: ignore[operator]
            self._receiver.finish()
            self._synchronize()
        with self._stages("verify"):
            num_unverified = self._verify(copies, sent)
        if not self._request.partial:
            self._receiver.last_names = manifest.names
        self.peers.report(
            LOADED,
            through_loader={name: copies.plan.through_loader[name][:100] for name in islice(self._staging, MAX_NAMES)},
            num_unverified=num_unverified,
            seconds=self._stages.seconds,
        )

    # Before any parameter changes.

    def _wait_until_open(self, box: Mailbox) -> int:
        wait = PollingWait(self._request.timeout_s, "the trainer to start the update", self.peers.check)
        while (number := box.declared(self._request.sequence)) is None:
            wait.pause()
        return number

    def _check_coverage(self, copies: Copies) -> None:
        uncovered = copies.plan.uncovered
        if not uncovered or self._request.partial:
            return
        missing = [f"{name!r} ({count} elements)" for name, count in uncovered.items()]
        message = f"no tensor was sent for these parameters of the engine: {first_few(missing)}"
        if gone := [repr(name) for name in self._receiver.last_names if name not in copies.manifest.index]:
            message += f"; tensors of the last complete update that are missing now: {first_few(gone)}"
        raise ValueError(message)

    def _reject_unused(self, manifest: Manifest, counts: NDArray[np.int64]) -> None:
        unused = [manifest.names[i] for i in np.flatnonzero(counts == 0)]
        unused = [repr(name) for name in unused if not self._receiver.may_ignore(name)]
        if unused:
            raise ValueError(
                f"the engine's model has no parameter for these tensors: {first_few(unused)}; check the names against "
                f"the engine's checkpoint, or do not send them"
            )
        # SGLang's sharded layers silently ignore what exceeds their own shape.
        cut = [
            f"{manifest.names[i]!r} ({counts[i]} of {manifest.numel[i]} elements)"
            for i in np.flatnonzero((counts > 0) & (counts < manifest.numel))
        ]
        if cut:
            raise ValueError(
                f"the engine's model reads only a part of these tensors: {first_few(cut)}; send them in the shapes of "
                f"the engine's checkpoint"
            )

    # The copies.

    def _copy(self, copies: Copies) -> NDArray[np.int64]:
        """Copy the buckets of all trainer ranks as they are filled; return the checksums of what was sent."""
        # Each rank starts with another trainer rank, so that over a link no trainer rank serves all at once.
        num_boxes = len(self._boxes)
        pending = {(index + self.peers.row) % num_boxes: 0 for index in range(num_boxes)}
        num_left = len(copies.manifest.descriptors)
        sent = np.zeros_like(copies.counts)
        wait = PollingWait(self._request.timeout_s, "the trainer's next bucket", self.peers.check)
        while pending:
            ready = self._ready(pending, copies)
            if not ready:
                with self._stages("wait"):
                    wait.pause()
                continue
            num_left -= len(ready)
            with self._stages("copy"):
                if not self.changed:
                    self._begin(copies)
                if copies.in_place is not None and any(each not in copies.in_arena[i] for i, each in ready.items()):
                    copies.in_place.run(None, self._staging)
                for index, bucket in ready.items():
                    if bucket in copies.in_arena[index]:
                        received = self._receive(index, bucket)
                        copies.in_arena[index][bucket].run(received, self._staging)
                if num_left == 0:
                    sent = copies.sent(self._boxes)  # while a GPU copies the last of them
                self._synchronize()
            for index in ready:
                pending[index] += 1
                self._boxes[index].acknowledge(self._request.sequence, self.peers.row, pending[index])
            wait.progress()
        return sent

    def _begin(self, copies: Copies) -> None:
        """Write the constants of the plan, before the first copy."""
        self.changed = True
        for name in copies.plan.through_loader:  # in the order in which they must be loaded
            source = copies.manifest.sources[copies.manifest.index[name]]
            self._staging[name] = torch.empty(source.shape, dtype=source.dtype, device=self._receiver.device)
        write_fills(copies.parameters, copies.plan.fills)

    def _ready(self, pending: dict[int, int], copies: Copies) -> dict[int, int]:
        """Return the next bucket of each trainer rank that has filled it, and drop the ranks that have finished."""
        ready = {}
        for index, bucket in list(pending.items()):
            num_filled, is_finished = self._boxes[index].published(self._request.sequence)
            if bucket < num_filled:
                ready[index] = bucket
            elif is_finished:
                del pending[index]
        in_place = [index for index, bucket in ready.items() if bucket not in copies.in_arena[index]]
        if len(in_place) < copies.num_in_place:  # buckets read in place are copied together
            for index in in_place:
                del ready[index]
        return ready

    def _receive(self, index: int, bucket: int) -> Tensor | None:
        """Return the bytes of a bucket in memory that this process cannot map; None if it can."""
        box = self._boxes[index]
        if not isinstance(box, RemoteMailbox):
            return None
        return box.receive(self._request.sequence, self.peers.row, bucket, self.peers.check)

    # After the copies.

    def _verify(self, copies: Copies, sent: NDArray[np.int64]) -> int:
        """Compare what all ranks copied with what the trainer sent; return the number of tensors that could not be
        compared.

        A tensor can be compared if each element was copied equally often (once, or once per replica). Tensors that the
        model's own loader writes cannot be compared.
        """
        manifest = copies.manifest
        checksums, counts = self.peers.exchange(COPIED, copies.checksums(), copies.counts)
        comparable = counts % manifest.numel == 0
        wrong = comparable & (checksums != sent * (counts // manifest.numel))
        if wrong.any():
            names = [repr(manifest.names[i]) for i in np.flatnonzero(wrong)]
            raise RuntimeError(
                f"checksum mismatch: these tensors did not arrive as they were sent: {first_few(names)}; they must "
                f"not change during the update"
            )
        comparable[[manifest.index[name] for name in copies.plan.through_loader]] = False
        return int((~comparable).sum())

    def _synchronize(self) -> None:
        if self._receiver.device.type == "cuda":
            torch.cuda.current_stream(self._receiver.device).synchronize()
