"""The fast path on one trainer rank: from what it holds to engines that were launched with our loader."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from tidemill_weight_update.allocation import allocations
from tidemill_weight_update.audience import Audience
from tidemill_weight_update.known import Known
from tidemill_weight_update.mailbox import Mailbox
from tidemill_weight_update.outgoing import in_place
from tidemill_weight_update.packing import pack
from tidemill_weight_update.sender import Prepared, Sender
from tidemill_weight_update.shards import Held
from tidemill_weight_update.source import NamedTensors, pieces_of
from tidemill_weight_update.stages import Stages


class FastPath:
    """Keeps the sender and what it prepared between updates.

    Args:
        bucket_bytes: of each half of the arena, at most.
        dtype: in which floating-point tensors are sent; None: their own.
        device: of the arena; None: where the first tensor is.
        allow_non_finite: whether infinite and not-a-number elements may be sent.
        timeout_s: longest wait for an engine to make progress.
        group_rank: of this process among the trainer's ranks.
    """

    def __init__(
        self,
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
        allow_non_finite: bool,
        timeout_s: float,
        group_rank: int,
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._device = device
        self._allow_non_finite = allow_non_finite
        self._timeout_s = timeout_s
        self._group_rank = group_rank
        self._sequence = 0
        self._sender: Sender | None = None
        self._control: Mailbox | None = None
        self._known = Known([])
        self._prepared: list[Prepared] = []
        self._pieces: list[Held] = []  # alive while an update reads them by their addresses

    def begin(self, sequence: int) -> Mailbox:
        """Opens this rank's mailbox for an update."""
        if self._sender is None:
            self._sender = Sender(self._bucket_bytes, self._allow_non_finite)
        self._sequence = sequence
        self.mailbox.begin(sequence)
        return self.mailbox

    @property
    def mailbox(self) -> Mailbox:
        return self._require_sender().mailbox

    def fail(self) -> None:
        """Tells the engines that this rank sends no more."""
        self.mailbox.fail(self._sequence)

    def prepare(self, named_tensors: NamedTensors) -> list[Prepared]:
        """Describes tensors that stay where they are until the update is over; nothing is sent yet.

        What was described for the last update is used again if the same parameters come again.
        """
        items = list(named_tensors)
        if self._known.are(items):
            return self._prepared
        pieces = list(pieces_of(items, self._dtype, self._group_rank))
        prepared = [] if not pieces else self._prepare_all(pieces, self._use_device_of(pieces[0]))
        # Kept for the next update are addresses only, and only those of the tensors that were passed.
        known = Known(items)
        kept = all(isinstance(piece, int) for line in prepared for piece in line.pieces) and known.hold(pieces)
        self._known, self._prepared = (known, prepared) if kept else (Known([]), [])
        self._pieces = pieces
        return prepared

    def stream(self, named_tensors: NamedTensors) -> Iterator[Prepared]:
        """Describes tensors as they come; they may be gone when the next one is asked for."""
        for outgoing in pack(pieces_of(named_tensors, self._dtype, self._group_rank), self._bucket_bytes):
            self._use_device_of(outgoing.pieces[0])
            yield self._require_sender().prepare(outgoing)

    def _prepare_all(self, pieces: Sequence[Held], device: torch.device) -> list[Prepared]:
        sender = self._require_sender()
        if device.type == "cuda":
            stay, memories, memory_of, move = allocations(pieces, device)
        else:
            stay, memories, memory_of, move = [], [], [], pieces
        prepared = [sender.prepare(in_place(stay, memories, memory_of))] if stay else []
        return prepared + [sender.prepare(outgoing) for outgoing in pack(move, self._bucket_bytes)]

    def _use_device_of(self, piece: Held) -> torch.device:
        if self._device is None:
            self._device = piece.local.device
        self._require_sender().use(self._device)
        return self._device

    def _require_sender(self) -> Sender:
        assert self._sender is not None, "begin() comes first"
        return self._sender

    def send(self, lines: Iterable[Prepared], control: str, num_receivers: int, stages: Stages) -> tuple[int, int, int]:
        """Sends lines to all engine ranks; see `Sender.send`.

        Args:
            lines: a list if the update is complete, else an iterator.
            control: path of trainer rank 0's mailbox.
        """
        sender = self._require_sender()
        sender.open(self._sequence, lines if isinstance(lines, list) else None)
        if self._control is None or self._control.path != control:
            self._control = sender.mailbox if sender.mailbox.path == control else Mailbox.open(control)
        audience = Audience(self._sequence, sender.mailbox, self._control, num_receivers, self._timeout_s)
        try:
            return sender.send(self._sequence, lines, audience, stages)
        finally:
            self._pieces = []

    def close(self) -> None:
        if self._sender is None:
            return
        if self._control is not None and self._control is not self._sender.mailbox:
            self._control.close()
        self._sender.close()
        self._sender = self._control = None
        self._known, self._prepared = Known([]), []
