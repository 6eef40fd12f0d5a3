"""Processes at both ends of a link that are killed or stopped in the middle of an update."""

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from far_engines import FarEngine, Rank, context
from far_trainer import Outcome, Plan, main
from tidemill_weight_update import GroupLink, WeightUpdater
from tidemill_weight_update.request import TOKEN_VARIABLE
from toy_engines import ToyEngine, freshly_loaded, same, tensors

pytestmark = pytest.mark.timeout(150)

DEADLINE_S = 4
AFTER = 8
"""Tensors that were drawn from the generator when it happens: some buckets have arrived, and more are to come."""


@pytest.fixture
def ranks(tmp_path, monkeypatch) -> Iterator[list[Rank]]:
    """The two ranks of an engine, and the rank of another one."""
    monkeypatch.setenv(TOKEN_VARIABLE, "the token of this run")
    started = [Rank(tmp_path, f"far{i}") for i in range(3)]
    for rank in started:
        rank.wait_until_up()
    yield started
    for rank in started:
        rank.kill()


def run(
    folder: Path, ranks: list[Rank], victim: int | str, how: signal.Signals, world_size: int = 2
) -> list[Outcome | None]:
    """What the trainer's ranks say about the update; None: killed."""
    plan = Plan(
        folder=str(folder),
        engines=[[rank.path for rank in ranks[:2]], [rank.path for rank in ranks[2:]]],
        world_size=world_size,
        timeout_s=DEADLINE_S,
        victim=victim,
        signal=how,
        after=AFTER,
    )
    pipes = [context().Pipe(duplex=False) for _ in range(world_size)]
    trainers = [
        context().Process(target=main, args=(plan, rank, os.environ[TOKEN_VARIABLE], pipe), daemon=True)
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for trainer, (_, pipe) in zip(trainers, pipes, strict=True):
        trainer.start()
        pipe.close()
    try:
        outcomes = [_outcome(pipe) for pipe, _ in pipes]
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.join()
    return outcomes


def _outcome(pipe: Connection) -> Outcome | None:
    assert pipe.poll(100), "a trainer rank hangs"
    try:
        return pipe.recv()
    except EOFError:
        return None


def check_survivor(outcome: Outcome | None) -> Outcome:
    assert outcome is not None
    assert outcome.seconds < 2 * DEADLINE_S + 2  # an engine's deadline may begin when the trainer's is nearly over
    assert all(now <= then for now, then in zip(outcome.after, outcome.before, strict=True))  # fewer: to who was killed
    return outcome


def check_usable(ranks: list[Rank], *, fresh: bool = False) -> None:
    """The processes obey again, and another trainer can update them.

    Args:
        fresh: they make another engine than before.
    """
    started = time.monotonic()
    engine = FarEngine([rank.path for rank in ranks], fresh=fresh)
    engine.ask_all("resources")
    assert time.monotonic() - started < DEADLINE_S + 2
    updater = WeightUpdater([engine], bucket_bytes=300, link=GroupLink(), timeout_s=20)
    checkpoint = tensors(9)
    assert updater.update(checkpoint.items(), 9).verified
    assert same(engine.state(), freshly_loaded(ToyEngine(len(ranks)), checkpoint))
    updater.close()
    engine.close()


def test_a_trainer_rank_that_is_killed_is_an_error_everywhere(tmp_path, ranks):
    survivor, victim = run(tmp_path, ranks, "rank 1", signal.SIGKILL)
    assert victim is None
    outcome = check_survivor(survivor)
    assert outcome.error
    assert outcome.versions == ["2", "2"]
    check_usable(ranks[:2])
    check_usable(ranks[2:])


def test_the_trainer_rank_that_hosts_the_store_is_killed(tmp_path, ranks):
    victim, survivor = run(tmp_path, ranks, "rank 0", signal.SIGKILL)
    assert victim is None
    assert check_survivor(survivor).error
    check_usable(ranks[:2])
    check_usable(ranks[2:])


def test_an_engine_rank_that_is_killed_is_fenced_and_other_engines_go_on(tmp_path, ranks):
    outcomes = [check_survivor(outcome) for outcome in run(tmp_path, ranks, ranks[1].pid, signal.SIGKILL)]
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert [list(outcome.fenced) for outcome in outcomes] == [["engine 0 of 2 (engine 0)"]] * 2
    assert outcomes[0].versions == ["2", "3"]
    check_usable(ranks[2:])
    check_usable(ranks[:1], fresh=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_engine_rank_that_hangs_is_fenced_within_the_deadline(tmp_path, ranks, world_size):
    outcomes = [check_survivor(outcome) for outcome in run(tmp_path, ranks, ranks[1].pid, signal.SIGSTOP, world_size)]
    assert [outcome.error for outcome in outcomes] == [""] * world_size
    assert [list(outcome.fenced) for outcome in outcomes] == [["engine 0 of 2 (engine 0)"]] * world_size
    assert outcomes[0].versions == ["2", "3"]
    check_usable(ranks[2:])
    check_usable(ranks[:1], fresh=True)
