"""The fast path on one trainer rank: from the tensors it holds to engines with the tidemill loader."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidemill_weight_update.control.board import SharedBoard, path_of
from tidemill_weight_update.control.mailbox import Mailbox
from tidemill_weight_update.control.readers import Readers
from tidemill_weight_update.remote.group_link import GroupLink
from tidemill_weight_update.send.allocation import allocations
from tidemill_weight_update.send.fast_bucket import in_place, pack
from tidemill_weight_update.send.fingerprint import Fingerprint
from tidemill_weight_update.send.sender import PreparedBucket, Sender
from tidemill_weight_update.stages import Stages
from tidemill_weight_update.tensors.plain_names import PlainNames
from tidemill_weight_update.tensors.shards import Piece, ShardLike
from tidemill_weight_update.tensors.source import NamedTensors, pieces_of

if TYPE_CHECKING:
    from tidemill_weight_update.remote.trainer_link import TrainerLink


class FastPath:
    """Describes tensors and sends them; keeps the sender and the descriptions between updates.

    Args:
        bucket_bytes: maximum size of each half of the arena.
        dtype: dtype in which floating-point tensors are sent; None: their own.
        device: device of the arena; None: that of the first tensor.
        allow_non_finite: whether infinite and NaN elements may be sent.
        timeout_s: longest wait for an engine to make progress.
        group_rank: rank of this process among the trainer ranks.
        link: connection to engines on other machines. With a link all tensors are copied to the arena, whose halves
            have half the size: the other half of the memory is needed to pack the part that each engine rank reads.

    Attributes:
        plain: names of the plain tensors of the last update.
        is_link_broken: whether an engine or a rank failed, so that the next update opens the link anew; set on rank 0.
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
        self._board: SharedBoard | None = None
        self._sequence = 0
        self._sender: Sender | None = None
        self._control: Mailbox | None = None
        self._fingerprint = Fingerprint([])
        self._prepared: list[PreparedBucket] = []
        self.plain = self._kept_plain = PlainNames()
        # Referenced while an update reads them by address: the tensors passed, and the temporary tensors made of them.
        self._items: list[tuple[str, Tensor | ShardLike]] = []
        self._pieces: list[Piece] = []
        self._is_same_input = False
        self._num_freed: int | None = None
        self._is_being_read = False
        self._others_mostly_unused = False
        self._engines: Sequence[tuple[int, range]] = ()
        self.is_link_broken = False

    def begin(self, sequence: int, engines: Sequence[tuple[int, range]]) -> tuple[int, int]:
        """Start an update; return what the other ranks need for `connect`.

        Args:
            engines: identity and rows of each engine, on rank 0; a link is opened anew for other engines.
        """
        self._sequence = sequence
        self._is_being_read = False  # may be True after an interrupt
        is_mostly_unused = self._sender is not None and self._sender.is_mostly_unused
        if self._link is not None and self._group_rank > 0:
            return int(is_mostly_unused), 0
        is_other_link = self._link is not None and (engines != self._engines or self.is_link_broken)
        self._engines, self.is_link_broken = engines, False
        if is_mostly_unused or self._others_mostly_unused or is_other_link:
            self.close()  # a new mailbox (with a link: a new link for all ranks) makes engines drop their caches too
        if self._link is not None:
            return self._link.open()
        if self._sender is None:
            self._board = SharedBoard.create()
            self._sender = Sender(Mailbox(self._board), self._bucket_bytes, self._allow_non_finite)
        assert self._board is not None
        self._sender.mailbox.begin(sequence)
        return self._board.identity

    def connect(self, begun: Sequence[tuple[int, int]], num_receivers: int) -> tuple[str, ...]:
        """Return the paths of all ranks' mailboxes in rank order; this rank's mailbox is open for the update.

        Args:
            begun: return values of `begin` on all ranks.

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
    def mailbox(self) -> Mailbox:
        return self._require_sender().mailbox

    def fail(self) -> None:
        """Announce to the engines that this rank sends no more buckets."""
        self.mailbox.fail(self._sequence)
        if self._link is not None:
            self._link.close_connections()

    def prepare(
        self, named_tensors: NamedTensors, stages: Stages, let_calls_start: Callable[[bool], None]
    ) -> list[PreparedBucket]:
        """Describe tensors that stay in place until the update is complete; nothing is sent yet.

        The descriptions of the last update are reused if the same tensors are passed again. If that was the case at the
        last update too, the GPU starts to read them while the comparison runs, which is safe as long as the allocations
        exist.

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

    def _describe(self, items: list[tuple[str, Tensor | ShardLike]]) -> list[PreparedBucket]:
        self.plain = self._kept_plain = PlainNames()
        pieces = list(pieces_of(items, self._dtype, self._group_rank, self.plain))
        prepared = [] if not pieces else self._prepare_all(pieces, self._use_device_of(pieces[0]))
        # Keep descriptions for the next update only if they refer to the passed tensors by address.
        fingerprint = Fingerprint(items)
        kept = all(isinstance(piece, int) for bucket in prepared for piece in bucket.pieces) and fingerprint.covers(
            pieces
        )
        self._fingerprint, self._prepared = (fingerprint, prepared) if kept else (Fingerprint([]), [])
        self._pieces = pieces
        return prepared

    def _is_still_allocated(self, num_freed: int | None) -> bool:
        """Return whether the allocations of the last update's tensors still exist.

        A new allocation can have the same address, but engines have not mapped it.
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
        """Describe tensors one bucket at a time; each may be freed when the next one is requested."""
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
        assert self._sender is not None, "call begin() first"
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
        """Send buckets to all engine ranks; see `Sender.send`.

        Args:
            buckets: a list if the update is complete, else an iterator.
            control: path of the mailbox of trainer rank 0.
        """
        sender = self._require_sender()
        try:
            sender.open(self._sequence, buckets if isinstance(buckets, list) else None)
            readers = self._new_readers(sender.mailbox, control, num_receivers)
            return sender.send(self._sequence, buckets, readers, stages, started, finishing, self._is_being_read)
        finally:
            self._is_being_read = False
            self._items, self._pieces = [], []

    def _new_readers(self, own: Mailbox, control: str, num_receivers: int) -> Readers:
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
