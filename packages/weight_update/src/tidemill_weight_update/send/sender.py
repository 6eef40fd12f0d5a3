"""The trainer's side of the fast path: one trainer rank, which publishes what it holds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tidemill_weight_update.control.channel import Channel, Place
from tidemill_weight_update.control.descriptor import Line, line_to_json, list_to_json, memory_to_json
from tidemill_weight_update.control.readers import Audience
from tidemill_weight_update.copy.copier import SendCopier, send_copier
from tidemill_weight_update.copy.sums import Tally
from tidemill_weight_update.memory.arena import Arena, ArenaRing, new_arena
from tidemill_weight_update.memory.handle import Memory
from tidemill_weight_update.send.fast_bucket import Outgoing
from tidemill_weight_update.stages import Stages


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A line that stands in the journal, and what fills it.

    Attributes:
        place, line: in the journal.
        names: of its sources.
        copier: fills the arena, or only reads.
        tally: of the sources, as `copier` last read them.
        pieces: what is copied to the arena, tensors or their addresses, or the addresses of the memories that stay.
        num_bytes, payload_bytes: in the arena, and of the pieces alone.
    """

    place: Place
    line: Line
    names: tuple[str, ...]
    copier: SendCopier
    tally: Tally
    pieces: Sequence[Tensor] | Sequence[int]
    num_bytes: int
    payload_bytes: int


WORN_BYTES = 1 << 20
"""Of descriptions that are not used any more; fewer are kept without asking."""


class Sender:
    """Publishes lines in this rank's mailbox, and the tensors they describe.

    Args:
        mailbox: of this rank.
        bucket_bytes: of each half of the arena, at most.
        allow_non_finite: whether infinite and not-a-number elements may be sent.
    """

    def __init__(self, mailbox: Channel, bucket_bytes: int, allow_non_finite: bool) -> None:
        self.mailbox = mailbox
        self._device = torch.device("cpu")
        self._allow_non_finite = allow_non_finite
        self._bucket_bytes = bucket_bytes
        self._room = 0
        self._end = 0
        self._used = 0
        self._num_digests = 0
        self._written: dict[bytes, Place] = {}
        self._lines: dict[object, tuple[Place, Line, SendCopier, Tally]] = {}
        self._arenas: ArenaRing[Memory] = ArenaRing(2, partial(new_arena, self._device))

    @property
    def is_worn(self) -> bool:
        """Whether most of what the journal describes is not used any more, as tensors came in ever new ways."""
        return self._end > 4 * self._used + WORN_BYTES

    def open(self, sequence: int, lines: Sequence[Prepared] | None) -> None:
        """Opens the update and tells which lines it will have, if they are known."""
        # Both halves get all the room they will need: one that grows is mapped twice by the engines for a while.
        self._room = self._bucket_bytes if lines is None else max((line.num_bytes for line in lines), default=0)
        listed = None if lines is None else self._write(list_to_json([line.place for line in lines]))
        self._arenas.rewind()
        self.mailbox.announce(sequence, listed)

    def use(self, device: torch.device) -> None:
        """Says where the arena lives, before the first line."""
        if device != self._device:
            self._device = device
            self._arenas.close()
            self._arenas = ArenaRing(2, partial(new_arena, device))

    def prepare(self, outgoing: Outgoing) -> Prepared:
        """Writes a line into the journal, unless it stands there, and gets ready to fill it."""
        layout = outgoing.layout()
        if layout not in self._lines:
            line = replace(outgoing.line, first_digest=self._num_digests)
            self._num_digests += len(line.sources)
            copier = send_copier(outgoing.tables(self._device), self._device, stays=bool(outgoing.line.memories))
            tally = Tally(len(line.sources), self._device, counts_non_finite=not self._allow_non_finite)
            self._lines[layout] = (self._append(line_to_json(line)), line, copier, tally)
        place, line, copier, tally = self._lines[layout]
        return Prepared(
            place=place,
            line=line,
            names=tuple(source.name for source in line.sources),
            copier=copier,
            tally=tally,
            pieces=outgoing.addresses or self._pieces(outgoing),
            num_bytes=outgoing.num_bytes,
            payload_bytes=outgoing.payload_bytes,
        )

    def _pieces(self, outgoing: Outgoing) -> list[Tensor] | list[int]:
        """Addresses if they are enough, so that a line that is kept does not keep tensors alive."""
        pieces = [piece.local for piece in outgoing.pieces]
        if self._device.type == "cpu" or any(piece.device != self._device for piece in pieces):
            return pieces
        return [piece.data_ptr() for piece in pieces]

    def send(
        self,
        sequence: int,
        lines: Iterable[Prepared],
        audience: Audience,
        stages: Stages,
        started: Callable[[], None],
        finishing: Callable[[Audience], None],
        is_being_read: bool = False,
    ) -> tuple[int, int, int]:
        """Publishes lines one after the other, each when its half of the arena is free; returns when all were read.

        `started` is called as soon as a GPU is busy with the first line: what it does takes no time of its own.
        `finishing` is called once, while engines copy the last lines: none can come to its end before it returns.

        Args:
            is_being_read: whether `fill` was called for the first line, which stays where it is.

        Returns:
            numbers of lines and of tensors that they have parts of, and bytes.

        Raises:
            ValueError: a tensor has elements that are not finite; the lines before it are published.
            TimeoutError: an engine made no progress for too long.
        """
        bucket = num_bytes = self._used = 0
        names: set[str] = set()
        for line in lines:
            with stages("load"):
                audience.wait(bucket - 1)
            with stages("fill"):
                arena = None if is_being_read and bucket == 0 else self.fill(line)
            if bucket == 0:
                started()
            with stages("fill"):
                where = self._filled(line, arena)
            self.mailbox.publish(sequence, bucket, line.place, where)
            with stages("load"):
                audience.deliver(bucket, line.place, line.line, None if arena is None else arena.data)
            self._used += line.place[1]
            num_bytes += line.payload_bytes
            names.update(line.names)
            bucket += 1
        if bucket == 0:
            started()
        with stages("load"):
            finishing(audience)
        self.mailbox.finish(sequence, bucket)
        with stages("load"):
            audience.wait(bucket)
        return bucket, len(names), num_bytes

    def close(self) -> None:
        self._arenas.close()
        self._lines.clear()
        self.mailbox.close()

    def fill(self, line: Prepared) -> Arena[Memory] | None:
        """Begins to fill the next arena, which is returned, or only to read what stays where it is."""
        arena = self._arenas.next(max(line.num_bytes, self._room)) if line.num_bytes else None
        line.tally.clear()
        line.copier.run(line.pieces, None if arena is None else arena.data, line.tally.digests, line.tally.non_finite)
        line.tally.fetch()
        return arena

    def _filled(self, line: Prepared, arena: Arena[Memory] | None) -> Place | None:
        """Waits for `fill` and looks at what it found; returns the journal's line about the arena."""
        line.tally.wait()
        found = [] if self._allow_non_finite else line.tally.not_finite()
        if found:
            names = ", ".join(repr(line.names[i]) for i in found[:5])
            raise ValueError(
                f"{len(found)} of the tensors have elements that are infinite or not a number: {names}; engines "
                f"that have loaded others of this update are paused until one is complete (allow_non_finite=True sends "
                f"such tensors)"
            )
        self.mailbox.write_digests(line.line.first_digest, line.tally.digests_on_host())
        return None if arena is None else self._write(memory_to_json(arena.publish()))

    def _write(self, text: bytes) -> Place:
        if text not in self._written:
            self._written[text] = self._append(text)
        return self._written[text]

    def _append(self, text: bytes) -> Place:
        place = (self._end, len(text))
        self.mailbox.write_journal(self._end, text)
        self._end += len(text)
        return place
