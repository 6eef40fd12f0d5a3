"""Trainer and engine processes of a link that are killed or stopped during an update."""

import signal
from collections.abc import Iterator

import pytest
from interrupted_trainer import check_survivor, check_usable, run
from remote_engines import RankProcess


@pytest.fixture
def ranks(tmp_path) -> Iterator[list[RankProcess]]:
    """Two ranks of one engine, and the rank of another."""
    started = [RankProcess(tmp_path, f"remote{i}") for i in range(3)]
    for rank in started:
        rank.wait_until_up()
    yield started
    for rank in started:
        rank.kill()


def test_killed_trainer_rank_is_an_error_on_the_others(tmp_path, ranks):
    survivor, victim = run(tmp_path, [ranks[:2], ranks[2:]], "rank 1", signal.SIGKILL)
    assert victim is None
    outcome = check_survivor(survivor)
    assert outcome.error
    assert outcome.versions == ["2", "2"]
    check_usable(ranks[:2])
    check_usable(ranks[2:])


def test_killed_store_host_is_an_error_on_the_others(tmp_path, ranks):
    victim, survivor = run(tmp_path, [ranks[:2], ranks[2:]], "rank 0", signal.SIGKILL)
    assert victim is None
    assert check_survivor(survivor).error
    check_usable(ranks[:2])
    check_usable(ranks[2:])


def test_engine_with_killed_rank_is_quarantined_and_others_are_updated(tmp_path, ranks):
    outcomes = [
        check_survivor(outcome) for outcome in run(tmp_path, [ranks[:2], ranks[2:]], ranks[1].pid, signal.SIGKILL)
    ]
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert [list(outcome.quarantined) for outcome in outcomes] == [["engine 0 of 2 (engine 0)"]] * 2
    assert outcomes[0].versions == ["2", "3"]
    check_usable(ranks[2:])
    check_usable(ranks[:1], fresh=True)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_engine_with_stopped_rank_is_quarantined_and_others_are_updated(tmp_path, ranks, world_size):
    outcomes = [
        check_survivor(outcome)
        for outcome in run(tmp_path, [ranks[:2], ranks[2:]], ranks[1].pid, signal.SIGSTOP, world_size)
    ]
    assert [outcome.error for outcome in outcomes] == [""] * world_size
    assert [list(outcome.quarantined) for outcome in outcomes] == [["engine 0 of 2 (engine 0)"]] * world_size
    assert outcomes[0].versions == ["2", "3"]
    check_usable(ranks[2:])
    check_usable(ranks[:1], fresh=True)
