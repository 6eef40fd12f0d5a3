"""The fast path on one trainer rank: from what it holds to engines that were launched with our loader."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidemill_weight_update.control.channel import Channel
from tidemill_weight_update.control.mailbox import Mailbox, path_of
from tidemill_weight_update.control.readers import Readers
from tidemill_weight_update.remote.group_link import GroupLink
from tidemill_weight_update.send.allocation import allocations
from tidemill_weight_update.send.fast_bucket import in_place
from tidemill_weight_update.send.fingerprint import Fingerprint
from tidemill_weight_update.send.packing import pack
from tidemill_weight_update.send.sender import PreparedBucket, Sender
from tidemill_weight_update.stages import Stages
from tidemill_weight_update.tensors.plain_names import PlainNames
from tidemill_weight_update.tensors.shards import LocalShard, Piece
from tidemill_weight_update.tensors.source import NamedTensors, pieces_of

if TYPE_CHECKING:
    from tidemill_weight_update.remote.trainer_link import TrainerLink


class FastPath:
    """Keeps the sender and what it prepared between updates.

    Args:
        bucket_bytes: of each half of the arena, at most.
        dtype: in which floating-point tensors are sent; None: their own.
        device: of the arena; None: where the first tensor is.
        allow_non_finite: whether infinite and not-a-number elements may be sent.
        timeout_s: longest wait for an engine to make progress.
        group_rank: of this process among the trainer's ranks.
        link: to engines on other machines. Then everything travels through the arena, whose halves have half the size:
            as much is needed to pack what each engine rank takes of it.

    Attributes:
        plain: the plain tensors of the last update.
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
        link: GroupLink | None,
    ) -> None:
        self._bucket_bytes = bucket_bytes if link is None else max(1, bucket_bytes // 2)
        self._dtype = dtype
        self._device = device
        self._allow_non_finite = allow_non_finite
        self._timeout_s = timeout_s
        self._group_rank = group_rank
        self._link = None if link is None else _trainer_link(link, group_rank, bucket_bytes, timeout_s)
        self._mailbox: Mailbox | None = None
        self._sequence = 0
        self._sender: Sender | None = None
        self._control: Channel | None = None
        self._fingerprint = Fingerprint([])
        self._prepared: list[PreparedBucket] = []
        self.plain = self._kept_plain = PlainNames()
        # Alive while an update reads them by their addresses: what came, which may be made anew each time, and what was
        # made of it.
        self._items: list[tuple[str, Tensor | LocalShard]] = []
        self._pieces: list[Piece] = []
        self._is_same_input = False
        self._num_freed: int | None = None
        self._is_being_read = False
        self._others_mostly_unused = False

    def begin(self, sequence: int) -> tuple[int, int]:
        """Starts an update; returns what the other ranks have to know for `connect`."""
        self._sequence = sequence
        self._is_being_read = False  # an interrupt may have left it
        is_mostly_unused = self._sender is not None and self._sender.is_mostly_unused
        if self._link is not None and self._group_rank > 0:
            return int(is_mostly_unused), 0
        if is_mostly_unused or self._others_mostly_unused:
            self.close()  # with a new mailbox, over a new link for all, engines too forget what they know of this one
        if self._link is not None:
            return self._link.open()
        if self._sender is None:
            self._mailbox = Mailbox.create()
            self._sender = Sender(self._mailbox, self._bucket_bytes, self._allow_non_finite)
        assert self._mailbox is not None
        self._mailbox.begin(sequence)
        return self._mailbox.identity

    def connect(self, begun: Sequence[tuple[int, int]], num_receivers: int) -> tuple[str, ...]:
        """The paths of all ranks' mailboxes, in their order; this rank's is open for the update.

        Args:
            begun: what `begin` returned on each rank.

        Raises:
            RuntimeError: over a link, rank 0 cannot be reached.
        """
        if self._link is None:
            return tuple(path_of(identity) for identity in begun)
        if not self._link.is_at(begun[0]):
            self.close()
        mailbox = self._link.connect(begun[0], num_receivers)
        self._others_mostly_unused = self._sender is not None and any(
            is_mostly_unused for is_mostly_unused, _ in begun[1:]
        )
        if self._sender is None:
            self._sender = Sender(mailbox, self._bucket_bytes, self._allow_non_finite)
        mailbox.begin(self._sequence)
        return self._link.paths(len(begun))

    @property
    def mailbox(self) -> Channel:
        return self._require_sender().mailbox

    def fail(self) -> None:
        """Tells the engines that this rank sends no more."""
        self.mailbox.fail(self._sequence)
        if self._link is not None:
            self._link.close_connections()

    def prepare(
        self, named_tensors: NamedTensors, stages: Stages, let_calls_start: Callable[[bool], None]
    ) -> list[PreparedBucket]:
        """Describes tensors that stay where they are until the update is over; nothing is sent yet.

        What was described for the last update is used again if the same parameters come again. If they did so at the
        last update, the GPU reads them while that is found out, which is safe as long as the allocations are there.

        Args:
            let_calls_start: called before long work in Python; its argument is whether the GPU reads meanwhile.
        """
        with stages("prepare"):
            items = list(named_tensors)
            num_freed = self._count_freed()
            is_kept = self._is_still_allocated(num_freed)
            reads = (
                is_kept and self._is_same_input and bool(self._prepared) and bool(self._prepared[0].descriptor.memories)
            )
        if reads:
            with stages("fill"):
                self._require_sender().fill(self._prepared[0])
        let_calls_start(reads)
        with stages("prepare"):
            self._is_same_input = is_kept and self._fingerprint.matches(items)
            buckets = self._prepared if self._is_same_input else self._describe(items)
            self.plain = self._kept_plain
            self._num_freed = num_freed
        self._items, self._is_being_read = items, reads and self._is_same_input
        return buckets

    def _describe(self, items: list[tuple[str, Tensor | LocalShard]]) -> list[PreparedBucket]:
        self.plain = self._kept_plain = PlainNames()
        pieces = list(pieces_of(items, self._dtype, self._group_rank, self.plain))
        prepared = [] if not pieces else self._prepare_all(pieces, self._use_device_of(pieces[0]))
        # Kept for the next update are addresses only, and only those of the tensors that were passed.
        fingerprint = Fingerprint(items)
        kept = all(isinstance(piece, int) for bucket in prepared for piece in bucket.pieces) and fingerprint.covers(
            pieces
        )
        self._fingerprint, self._prepared = (fingerprint, prepared) if kept else (Fingerprint([]), [])
        self._pieces = pieces
        return prepared

    def _is_still_allocated(self, num_freed: int | None) -> bool:
        """Whether the allocations are still there that the tensors of the last update lay in, where they did not move.

        Others may have come to the same addresses, which the engines have not mapped.
        """
        if self._device is None or (num_freed is not None and num_freed == self._num_freed):
            return True
        memories = [memory for bucket in self._prepared for memory in bucket.descriptor.memories]
        if not memories:
            return True
        from tidemill_weight_update.memory.cuda_memory import are_allocated

        return are_allocated(memories, self._device)

    def _count_freed(self) -> int | None:
        if self._device is None or self._device.type != "cuda":
            return None
        from tidemill_weight_update.memory.cuda_memory import num_freed

        return num_freed(self._device)

    def stream(self, named_tensors: NamedTensors) -> Iterator[PreparedBucket]:
        """Describes tensors as they come; they may be gone when the next one is asked for."""
        self.plain = PlainNames()
        for fast_bucket in pack(
            pieces_of(named_tensors, self._dtype, self._group_rank, self.plain), self._bucket_bytes
        ):
            self._use_device_of(fast_bucket.pieces[0])
            yield self._require_sender().prepare(fast_bucket)

    def _prepare_all(self, pieces: Sequence[Piece], device: torch.device) -> list[PreparedBucket]:
        sender = self._require_sender()
        if device.type == "cuda" and self._link is None:
            stay, memories, memory_of, move = allocations(pieces, device)
        else:
            stay, memories, memory_of, move = [], [], [], pieces
        prepared = [sender.prepare(in_place(stay, memories, memory_of))] if stay else []
        return prepared + [sender.prepare(fast_bucket) for fast_bucket in pack(move, self._bucket_bytes)]

    def _use_device_of(self, piece: Piece) -> torch.device:
        if self._device is None:
            self._device = piece.local.device
        self._require_sender().use(self._device)
        return self._device

    def _require_sender(self) -> Sender:
        assert self._sender is not None, "begin() comes first"
        return self._sender

    def send(
        self,
        buckets: Iterable[PreparedBucket],
        control: str,
        num_receivers: int,
        stages: Stages,
        started: Callable[[], None],
        finishing: Callable[[Readers], None],
    ) -> tuple[int, int, int]:
        """Sends buckets to all engine ranks; see `Sender.send`.

        Args:
            buckets: a list if the update is complete, else an iterator.
            control: path of trainer rank 0's mailbox.
        """
        sender = self._require_sender()
        try:
            sender.open(self._sequence, buckets if isinstance(buckets, list) else None)
            readers = self._new_readers(sender.mailbox, control, num_receivers)
            return sender.send(self._sequence, buckets, readers, stages, started, finishing, self._is_being_read)
        finally:
            self._is_being_read = False
            self._items, self._pieces = [], []

    def _new_readers(self, own: Channel, control: str, num_receivers: int) -> Readers:
        if self._link is not None:
            return self._link.readers(self._sequence, num_receivers)
        if self._control is not None and not (self._control.path == control and self._control.is_current()):
            if self._control is not own:
                self._control.close()
            self._control = None
        if self._control is None:
            self._control = own if own.path == control else Mailbox.open(control)
        return Readers(self._sequence, own, self._control, num_receivers, self._timeout_s)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._close_sender()

    def _close_sender(self) -> None:
        if self._sender is None:
            return
        if self._control is not None and self._control is not self._sender.mailbox:
            self._control.close()
        self._sender.close()
        self._sender = self._control = None
        self._fingerprint, self._prepared, self._is_same_input = Fingerprint([]), [], False


def _trainer_link(link: GroupLink, rank: int, bucket_bytes: int, timeout_s: float) -> "TrainerLink":
    from tidemill_weight_update.remote.trainer_link import TrainerLink

    return TrainerLink(link, rank, bucket_bytes, timeout_s)
