"""Contract of mailboxes over both boards: in shared memory, and in a store over a network."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest
from tidemill_weight_update.control.board import MAX_TENSORS, LinkError, SharedBoard
from tidemill_weight_update.control.mailbox import (
    ATTACHED,
    CHECKED,
    IDLE,
    LOADED,
    MIXED,
    Mailbox,
    Reader,
    ReaderState,
)
from tidemill_weight_update.remote.group_link import LinkAddress, LinkStore, StoreBoard
from torch.distributed import TCPStore


@dataclass
class Sides:
    """Views of one mailbox: the trainer rank's, and those of two engine ranks."""

    trainer: Mailbox
    engines: tuple[Mailbox, Mailbox]


@pytest.fixture
def server() -> TCPStore:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    timeout = timedelta(seconds=5)
    return TCPStore("127.0.0.1", port, None, True, timeout, False, master_listen_fd=listening.detach())


def client(server: TCPStore, timeout_s: float = 5) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=timeout_s), False)


def link(store, session: str = "session") -> LinkStore:
    return LinkStore(store, LinkAddress(host="127.0.0.1", port=store.port, session=session))


@pytest.fixture(params=["memory", "store"])
def sides(request) -> Iterator[Sides]:
    if request.param == "memory":
        trainer = Mailbox(SharedBoard.create())
        engines = tuple(Mailbox(SharedBoard.open(trainer.board.path)) for _ in range(2))
    else:
        server = request.getfixturevalue("server")
        board = StoreBoard(link(server), "path", 0)
        board.make_room(8)
        trainer = Mailbox(board)
        engines = tuple(Mailbox(StoreBoard(link(client(server)), "path", 0)) for _ in range(2))
    trainer.begin(0)
    yield Sides(trainer, engines)
    for box in (trainer, *engines):
        box.close()


def test_update_is_announced_bucket_by_bucket(sides):
    trainer, (engine, _) = sides.trainer, sides.engines
    trainer.begin(5)
    assert engine.declared(5) is None
    trainer.declare(b"the buckets")
    trainer.publish(5, 0)
    assert engine.declared(5) == 1
    assert engine.read_declaration() == b"the buckets"
    for count in range(3):
        assert engine.published(5) == (count, False)
        trainer.publish(5, count + 1)
    trainer.finish(5, 3)
    assert engine.published(5) == (3, True)


def test_declaration_is_valid_until_the_next_one(sides):
    trainer, (engine, _) = sides.trainer, sides.engines
    for sequence, (text, number) in enumerate([(b"first one", 1), (None, 1), (b"second", 2)], start=1):
        trainer.begin(sequence)
        if text is not None:
            trainer.declare(text)
        trainer.publish(sequence, 0)
        assert engine.declared(sequence) == number
        assert engine.read_declaration() == (b"first one", b"second")[number - 1]


def test_state_of_another_update_is_ignored(sides):
    trainer, (engine, _) = sides.trainer, sides.engines
    trainer.begin(1)
    trainer.publish(1, 0)
    trainer.publish(1, 1)
    trainer.exclude(1, 0)
    engine.report(1, 0, LOADED, {})
    engine.acknowledge(1, 0, 3)
    trainer.begin(2)
    assert engine.declared(2) is None
    assert engine.published(2) == (0, False)
    assert trainer.state(2, 0) == IDLE
    assert trainer.readers(2, 8) == [Reader()] * 8
    assert not trainer.is_excluded(2, 0)
    for read in (engine.declared, engine.published):
        with pytest.raises(RuntimeError, match="cancelled update 1"):
            read(1)


@pytest.mark.parametrize("num_buckets", [None, 3])
def test_failed_trainer_raises_on_engine_ranks(sides, num_buckets):
    sides.trainer.begin(1)
    if num_buckets is not None:
        sides.trainer.publish(1, 0)
        sides.trainer.finish(1, num_buckets)
        assert sides.engines[0].published(1) == (num_buckets, True)
    sides.trainer.fail(1)
    with pytest.raises(RuntimeError, match="the trainer failed while sending"):
        sides.engines[0].published(1)
    sides.trainer.begin(2)
    assert sides.engines[0].published(2) == (0, False)


def test_declaration_of_10_mib_arrives(sides):
    text = os.urandom(10 << 20)
    sides.trainer.begin(1)
    sides.trainer.declare(text)
    sides.trainer.publish(1, 0)
    while sides.engines[0].declared(1) is None:  # a store does not confirm what is written
        time.sleep(0.01)
    assert sides.engines[0].read_declaration() == text


def test_reports_of_engine_ranks_are_visible_to_all(sides):
    trainer, (first, second) = sides.trainer, sides.engines
    trainer.begin(3)
    first.report(3, 0, ATTACHED, {})
    second.report(3, 1, MIXED, {"error": "what happened", "numbers": [1, 2]})
    for view in (trainer, first, second):
        assert [view.state(3, row) for row in range(3)] == [ATTACHED, MIXED, IDLE]
        assert view.reply(1) == {"error": "what happened", "numbers": [1, 2]}
        assert [view.exited_receiver(3, row) for row in range(3)] == [None] * 3
    first.report(3, 0, CHECKED, {})
    assert trainer.state(3, 0) == CHECKED


def test_too_long_reply_is_truncated(sides):
    sides.trainer.begin(1)
    sides.engines[0].report(1, 0, MIXED, {"error": "x" * (1 << 20), "reached": CHECKED})
    assert sides.trainer.reply(0) == {"error": "x" * 4096, "reached": CHECKED}


def test_acknowledgements_and_exclusions_are_per_rank(sides):
    trainer, (first, second) = sides.trainer, sides.engines
    trainer.begin(1)
    first.acknowledge(1, 0, 4)
    second.acknowledge(1, 5, 1 << 31)
    assert [reader.released for reader in trainer.readers(1, 6)] == [4, 0, 0, 0, 0, 1 << 31]
    trainer.exclude(1, 0)
    trainer.exclude(1, 5)
    assert [first.is_excluded(1, row) for row in (0, 1, 5)] == [True, False, True]


def test_checksums_and_totals_arrive_as_int64(sides):
    trainer, (first, second) = sides.trainer, sides.engines
    checksums = np.array([-(2**63), 2**63 - 1, 0, -1], np.int64)
    trainer.write_checksums(3, checksums)
    assert first.sent(3, 4).tolist() == checksums.tolist()
    many = np.arange(200_000, dtype=np.int64)
    first.write_totals(2, many, -many)
    second.write_totals(3, checksums, checksums * 0)
    for view in (trainer, first):
        assert [part.tolist() for part in view.totals(2, 200_000)] == [many.tolist(), (-many).tolist()]
        assert [part.tolist() for part in view.totals(3, 4)] == [checksums.tolist(), [0] * 4]


def test_exited_engine_rank_is_detected(sides, monkeypatch):
    trainer, (engine, _) = sides.trainer, sides.engines
    trainer.begin(1)
    assert engine.owner[0] == os.getpid()
    assert not engine.owner_has_exited()
    exited = subprocess.Popen([sys.executable, "-c", ""])
    exited.wait()
    monkeypatch.setattr(os, "getpid", lambda: exited.pid)
    engine.report(1, 0, ATTACHED, {})
    assert trainer.exited_receiver(1, 0) == exited.pid
    assert trainer.exited_receiver(2, 0) is None


def test_process_of_another_machine_is_never_considered_exited(server, monkeypatch):
    """A process id that is unused here may be in use there."""
    board = StoreBoard(link(server), "path", 0)
    board.make_room(1)
    box = Mailbox(board)
    box.begin(1)
    monkeypatch.setattr("tidemill_weight_update.control.board.here", lambda: 1)
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
    Mailbox(StoreBoard(link(client(server)), "path", 0)).report(1, 0, ATTACHED, {})
    monkeypatch.undo()
    assert box.board.get("report", 0)[1] == 2**22 + 1
    assert box.exited_receiver(1, 0) is None


def test_reader_that_waits_for_a_bucket_is_seen_by_its_trainer_rank(sides):
    trainer, (first, second) = sides.trainer, sides.engines
    trainer.begin(4)
    first.acknowledge(4, 0, 1)
    first.wait_for(4, 0, 1, wire=2**62 - 1, parts=(2**56 - 1, 77))
    second.acknowledge(4, 2, 2)
    waiting, absent, mapping = trainer.readers(4, 3)
    assert waiting == Reader(1, ReaderState.WAITS, 2**62 - 1, (2**56 - 1, 77))
    assert [waiting.waits_for(bucket) for bucket in range(3)] == [False, True, False]
    assert absent == Reader()
    assert mapping == Reader(2, ReaderState.MAPS)


def test_too_many_tensors_are_refused(sides):
    sides.trainer.begin(1)
    many = np.zeros(MAX_TENSORS + 1, np.int64)
    with pytest.raises(ValueError, match=f"at most {MAX_TENSORS} tensors, got {MAX_TENSORS + 1}"):
        sides.engines[0].write_totals(0, many, many)


def test_text_beyond_its_area_is_refused_in_shared_memory():
    board = SharedBoard.create()
    with pytest.raises(RuntimeError, match="the declaration of the tensors needs more than 805306368 bytes"):
        board.write("declaration", 805306360, b"123456789")
    board.close()


# The store below.


def test_values_of_another_link_are_not_found(server):
    first = StoreBoard(link(server, "first"), "path", 0)
    first.write("declaration", 0, b"value")
    assert StoreBoard(link(client(server), "first"), "path", 0).read("declaration", 0, 5) == b"value"
    with pytest.raises(LinkError, match="does not respond"):
        StoreBoard(link(client(server, timeout_s=0.2), "second"), "path", 0).read("declaration", 0, 5)


def test_unresponsive_store_is_an_error_and_marks_the_board(server):
    board = StoreBoard(link(client(server, timeout_s=0.2)), "path", 0)
    assert board.is_current()
    with pytest.raises(LinkError, match="does not respond"):
        board.get("trainer", 0)
    assert not board.is_current()


def test_closed_store_is_refused(server):
    store = link(server)
    store.close()
    with pytest.raises(LinkError, match="closed"):
        StoreBoard(store, "path", 0).get("trainer", 0)
