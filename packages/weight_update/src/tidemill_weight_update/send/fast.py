"""The fast path on one trainer rank: from the tensors it holds to engines with the tidemill loader."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch

from tidemill_weight_update.client import GroupLink
from tidemill_weight_update.collector import paused_collector
from tidemill_weight_update.control.board import MAX_RECEIVERS, SharedBoard
from tidemill_weight_update.control.descriptor import Request
from tidemill_weight_update.control.mailbox import Mailbox, Readers
from tidemill_weight_update.copy.copier import Blocks
from tidemill_weight_update.cuda_memory import DeviceMemory, are_allocated, num_freed
from tidemill_weight_update.send.declaration import Declaration, Transfer
from tidemill_weight_update.send.fleet import Fleet
from tidemill_weight_update.send.ranks import Failure, RankLostError, Ranks
from tidemill_weight_update.send.sender import PreparedBucket, Sender, allocations, in_place, pack
from tidemill_weight_update.stats import Stages
from tidemill_weight_update.tensors import Item, Piece, Source, items_of, piece_to_send

if TYPE_CHECKING:
    from tidemill_weight_update.remote.trainer_link import TrainerLink


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The buckets of a declaration, as the sender declared them last.

    Attributes:
        fixed: buckets that refer to GPU memory by its address, with their addresses.
        passed: buckets whose tensors are passed for each update.
        positions: positions of the declared tensors in `fixed`.
        num_freed: number of allocations that torch had returned to CUDA before; see `cuda_memory.num_freed`.
    """

    declaration: Declaration
    fixed: list[tuple[PreparedBucket, list[int]]]
    passed: list[PreparedBucket]
    positions: frozenset[int]
    memories: Sequence[DeviceMemory]
    num_freed: int | None

    @property
    def is_in_place(self) -> bool:
        """Whether there is one bucket, which engines read in place."""
        return len(self.fixed) == 1 and not self.passed and self.fixed[0][0].descriptor.is_in_place


class FastPath:
    """Sends declared tensors; keeps the sender and the last declaration between updates.

    Args:
        bucket_bytes: maximum size of each half of the arena.
        link: connection to engines on other machines. With a link all tensors are copied to the arena, whose halves
            have half the size: the other half of the memory is needed to pack the part that each engine rank reads.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
        allow_non_finite: bool,
        timeout_s: float,
        link: GroupLink | None,
    ) -> None:
        self._ranks = ranks
        self._bucket_bytes = bucket_bytes if link is None else max(1, bucket_bytes // 2)
        self._dtype = dtype
        self._device = device
        self._allow_non_finite = allow_non_finite
        self._timeout_s = timeout_s
        self._group_link = link
        self._link: TrainerLink | None = None
        self._sequence = 0
        self._sender: Sender | None = None
        self._control: Mailbox | None = None
        self._last: Declaration | None = None
        self._prepared: Prepared | None = None
        self._all_in_place: Declaration | None = None
        self._reads_first = False
        self._engines: Sequence[tuple[int, range]] | None = None  # of the link; None: the next update opens it anew

    @property
    def mailbox(self) -> Mailbox:
        return self._require_sender().mailbox

    def declare(self, source: Source) -> Declaration:
        """Return the declaration of these tensors: the last one if it describes them."""
        if self._last is None or not self._last.describes(source):
            self._last = None  # its successor may raise
            with nullcontext() if callable(source) else paused_collector():  # a function may make garbage
                self._last = Declaration(source, self._dtype, self._ranks.rank)
        return self._last

    def begin(self, sequence: int, transfer: Transfer, fleet: Fleet) -> str:
        """Start an update; return the path of this rank's mailbox, with a link only on rank 0.

        Raises:
            ValueError: more engine ranks than a board in shared memory has rows, or a link and an engine without the
                tidemill loader.
            RuntimeError: the memory of a declared tensor has moved.
        """
        if self._group_link is None and fleet.num_receivers > MAX_RECEIVERS:
            raise ValueError(
                f"one WeightUpdater supports at most {MAX_RECEIVERS} engine ranks, got {fleet.num_receivers}; create "
                f"one for each part of the engines"
            )
        if self._group_link is not None and fleet.stock:
            raise ValueError(
                f"{', '.join(member.name for member in fleet.stock)} cannot use a link without the tidemill loader: "
                f"start the server with --custom-weight-loader tidemill_weight_update.sglang.loader.load, or an Engine "
                f"with **sglang_launch_args(); a WeightUpdater without link can update engines of its own machine"
            )
        self._sequence = sequence
        # The addresses of thousands of tensors are compared while a GPU reads them, if all ranks sent them in place
        # last time: no engine copies before all ranks have published, and what is read is known to be allocated.
        self._reads_first, self._all_in_place = self._all_in_place is transfer.declaration, None
        if not self._reads_first:
            transfer.check_memory()
        if self._group_link is not None:
            if self._ranks.rank > 0:
                return ""
            engines = [(id(member.client), member.rows) for member in fleet.members if member.rows]
            if self._link is None or engines != self._engines:  # a link connects a fixed set of engines
                self._open_link(self._group_link, fleet.num_receivers, "")
            self._engines = engines
            assert self._link is not None
            return self._link.path
        if self._sender is None:
            self._sender = Sender(Mailbox(SharedBoard.create()), self._allow_non_finite)
        self.mailbox.begin(sequence)
        return self.mailbox.board.path

    def update(
        self, transfer: Transfer, fleet: Fleet, begun: Sequence[str], num_receivers: int, stages: Stages
    ) -> tuple[int, int, int]:
        """Send the tensors of this rank while the engines read those of all ranks; return when all have responded.

        Rank 0 calls each engine once, in a thread. An error of any rank is raised on all.

        Args:
            fleet: engines of the update; empty except on rank 0.
            begun: return values of `begin` on all ranks.

        Returns:
            Numbers of buckets, tensors and bytes.
        """
        paths = self._connect(begun, num_receivers)
        # Rank 0 excludes an engine after one timeout, other ranks fail after two.
        request = Request(
            sequence=self._sequence,
            mailboxes=paths,
            first_receiver=0,
            num_receivers=0,
            partial=transfer.partial,
            timeout_s=3 * self._timeout_s,
        )
        fleet.connect(request, self.mailbox)

        def start() -> None:
            if not fleet.calls:
                fleet.load()
                if self._reads_first:
                    transfer.check_memory()

        failure, is_sent, is_in_place = Failure(), False, False
        try:
            with failure:
                if not self._reads_first:  # new engines load their kernel meanwhile
                    start()
                with stages("prepare"):
                    is_new = self._prepare(transfer)
                if is_new:  # engines read the new declaration meanwhile
                    start()
                readers, values = self._new_readers(paths[0], num_receivers), self._values(transfer.source)
                hold = partial(fleet.hold, self._timeout_s)
                self._require_sender().send(self._sequence, values, readers, stages, start, hold)
                is_sent, is_in_place = True, self._prepared is not None and self._prepared.is_in_place
            if not is_sent:  # the engines would wait
                self._cancel(fleet)
            # The engines compare checksums meanwhile. Other ranks may wait for engines now.
            rows = self._ranks.exchange(failure.error, [is_in_place], 3 * self._timeout_s)
            self._all_in_place = transfer.declaration if all(row[0] for row in rows) else None
        except RankLostError:
            is_sent = False
            raise
        finally:  # also after an interrupt
            if not is_sent:
                self._cancel(fleet)
            with stages("load"):
                fleet.join()
        return self._require_sender().counts

    def end(self, *, failed: bool) -> None:
        """Announce that the update is over, if it was complete; `failed`: whether an engine or a rank failed."""
        if failed:
            self._engines = None
        if self._sender is not None:
            self._sender.mailbox.end(self._sequence)

    def _connect(self, begun: Sequence[str], num_receivers: int) -> tuple[str, ...]:
        """Return the paths of all ranks' mailboxes in rank order; this rank's mailbox is open for the update."""
        if self._group_link is None:
            return tuple(begun)
        failure = Failure()
        with failure:
            if self._link is None or self._link.path != begun[0]:
                self._open_link(self._group_link, num_receivers, begun[0])
            self.mailbox.begin(self._sequence)
        self._ranks.exchange(failure.error, [], 3 * self._timeout_s)  # engines may open the boards of all ranks now
        assert self._link is not None
        return tuple(self._link.address.mailbox_path(rank) for rank in range(len(begun)))

    def _open_link(self, link: GroupLink, num_receivers: int, path: str) -> None:
        from tidemill_weight_update.remote.trainer_link import TrainerLink

        self.close()
        self._link = TrainerLink(link, self._ranks.rank, num_receivers, self._timeout_s, path)
        self._sender = Sender(self._link.mailbox, self._allow_non_finite)

    def _cancel(self, fleet: Fleet) -> None:
        """Announce that this rank sends no more buckets; if no engine was called, also that none reads."""
        self.mailbox.fail(self._sequence)
        if self._link is not None:
            self._link.close_wires()
        if not fleet.calls:
            fleet.exclude_all()

    def _prepare(self, transfer: Transfer) -> bool:
        """Write the declaration into the mailbox; return False if it is there, and its memory where it was."""
        prepared, declaration, source = self._prepared, transfer.declaration, transfer.source
        if prepared is not None and prepared.declaration is declaration and self._are_allocated(prepared):
            return False
        self._prepared = None  # if declaring fails, the mailbox may not contain the old declaration any more
        if self._reads_first:
            transfer.check_memory()
        with paused_collector():
            self._prepared = self._declared(declaration, [] if callable(source) else source)
        return True

    def _declared(self, declaration: Declaration, items: Sequence[Item]) -> Prepared:
        """Return the buckets of a declaration; `items` are its tensors if they stay where they are."""
        if self._device is None:
            self._device = next((piece.device for piece in declaration.pieces if piece is not None), None)
        device = self._device or torch.device("cpu")
        freed = num_freed(device) if device.type == "cuda" else None
        fixed: dict[int, Piece] = {}
        for position, item in enumerate(items):
            outline = declaration.pieces[position]
            if declaration.is_own[position] and outline is not None and outline.device == device != _CPU:
                piece = piece_to_send(*item, self._dtype, self._ranks.rank)
                assert piece is not None
                fixed[position] = piece
        pieces = list(fixed.values())
        stay, memories, memory_of, move = [], [], [], pieces
        if pieces and self._link is None:
            stay, memories, memory_of, move = allocations(pieces, device)
        buckets = [in_place(stay, memories, memory_of)] if stay else []
        values = [[memory.address for memory in memories]] if stay else []
        for bucket in pack(move, self._bucket_bytes):
            buckets.append(bucket)
            values.append([piece.local.data_ptr() for piece in bucket.pieces])
        rest = [piece for number, piece in enumerate(declaration.pieces) if piece is not None and number not in fixed]
        buckets += pack(rest, self._bucket_bytes)
        prepared = self._require_sender().declare(buckets, device)
        num_fixed = len(values)
        return Prepared(
            declaration=declaration,
            fixed=list(zip(prepared[:num_fixed], values, strict=True)),
            passed=prepared[num_fixed:],
            positions=frozenset(fixed),
            memories=memories,
            num_freed=freed,
        )

    def _are_allocated(self, prepared: Prepared) -> bool:
        """Return whether its allocations still exist. A new one can have the same address, but engines have not mapped
        it.
        """
        if not prepared.memories:
            return True
        assert self._device is not None
        is_unchanged = prepared.num_freed is not None and prepared.num_freed == num_freed(self._device)
        return is_unchanged or are_allocated(prepared.memories, self._device)

    def _values(self, source: Source) -> Iterator[tuple[PreparedBucket, Blocks]]:
        """Yield the buckets in their order with their values. A function is called when the first one is requested, and
        its tensors are read one bucket at a time.
        """
        prepared = self._prepared
        assert prepared is not None
        yield from prepared.fixed
        parts = prepared.declaration.parts(items_of(source), prepared.positions, self._bucket_bytes)
        for number, bucket in enumerate(prepared.passed, start=1):
            tensors = [part.local for part in islice(parts, bucket.num_pieces)]
            if number == len(prepared.passed):
                deque(parts, maxlen=0)  # raises if the tensors are not the declared ones
            yield bucket, tensors
        if not prepared.passed and callable(source):
            deque(parts, maxlen=0)  # reading them may be collective

    def _require_sender(self) -> Sender:
        assert self._sender is not None, "call begin() first"
        return self._sender

    def _new_readers(self, control: str, num_receivers: int) -> Readers:
        if self._link is not None:
            return self._link.readers(self._sequence, num_receivers)
        own = self.mailbox
        if self._control is None:  # the board of rank 0 lives as long as its updater
            self._control = own if own.board.path == control else Mailbox(SharedBoard.open(control))
        return Readers(self._sequence, own, self._control, num_receivers, self._timeout_s)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._sender is None:
            return
        if self._control is not None and self._control is not self._sender.mailbox:
            self._control.close()
        self._sender.close()
        self._sender = self._control = self._prepared = None


_CPU = torch.device("cpu")
