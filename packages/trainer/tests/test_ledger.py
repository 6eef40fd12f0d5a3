import re

import pytest
from tidemill_trainer.checkpoints import CheckpointError
from tidemill_trainer.ledger import InFlight, Ledger, LedgerError, Settlement, trained_problems


def _settlement(**changes):
    values = {
        "num_generated": 40,
        "trained": {7: 2, 9: 1},
        "num_trained_tokens": 25,
        "dropped": {"untrained branch": (0, 3)},
        "failed": {"ValueError": (1, 12)},
    }
    return Settlement(**(values | changes))


def test_every_episode_and_token_is_in_one_place(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.issue(1, [7, 9], 2)
    assert ledger.metrics()["ledger/episodes/in_flight"] == 4
    ledger.settle(1, _settlement())
    metrics = ledger.metrics()
    assert [metrics[f"ledger/episodes/{kind}"] for kind in ("issued", "trained", "failed", "in_flight")] == [4, 3, 1, 0]
    assert [metrics[f"ledger/tokens/{kind}"] for kind in ("generated", "trained", "dropped", "failed")] == [
        40,
        25,
        3,
        12,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_generated": 41},
            "every one of 41 tokens generated in exactly one place, found 25 trained + 3 dropped + 12 failed = 40",
        ),
        ({"num_trained_tokens": 24}, "= 39;"),
        (
            {"trained": {7: 2}},
            "every one of 4 episodes issued in exactly one place, found 2 trained + 0 dropped + 1 failed = 3",
        ),
        ({"trained": {7: 3, 9: 1}}, "= 5;"),
    ],
)
def test_missing_and_doubled_counts_are_errors(changes, message, tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.issue(1, [7, 9], 2)
    with pytest.raises(LedgerError, match=re.escape(message)):
        ledger.settle(1, _settlement(**changes))


def test_resumed_run_undoes_later_steps_and_trains_the_same_problems(tmp_path):
    whole, interrupted = tmp_path / "whole.jsonl", tmp_path / "interrupted.jsonl"

    def run(ledger, steps):
        for step in steps:
            ledger.issue(step, [17 + step, 9], 2)
            ledger.settle(step, _settlement(trained={17 + step: 2, 9: 1}))

    run(Ledger(whole), range(1, 6))
    first = Ledger(interrupted)
    run(first, range(1, 4))
    first.issue(4, [21, 9], 2)
    with interrupted.open("a") as file:
        file.write('{"event": "settl')  # killed while writing
    resumed = Ledger(interrupted)
    resumed.resume(2, {})
    run(resumed, range(3, 6))
    assert trained_problems(interrupted) == trained_problems(whole)
    metrics = Ledger(interrupted).metrics()
    kinds = ("trained", "dropped", "failed", "in_flight", "undone")
    assert metrics["ledger/episodes/issued"] == 28 == sum(metrics[f"ledger/episodes/{kind}"] for kind in kinds)
    assert metrics["ledger/episodes/undone"] == 8


def test_resume_without_later_steps_writes_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.resume(0, {})
    assert not (tmp_path / "ledger.jsonl").exists()


def test_episodes_in_flight_at_the_checkpoint_are_not_issued_again(tmp_path):
    """Step 2 had 4 episodes in flight and 15 tokens of finished ones when step 1 was saved; it is trained twice."""
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger(file)
    for step in (1, 2):
        ledger.issue(step, [7, 9], 2)
    ledger.settle(1, _settlement())
    in_flight = {2: InFlight(num_problems=2, num_episodes=4, num_tokens=15)}
    ledger.issue(3, [1, 2], 2)
    ledger.settle(2, _settlement())
    resumed = Ledger(file)
    resumed.resume(1, in_flight)
    assert resumed.num_problems == 4
    resumed.settle(2, _settlement(num_generated=50, trained={7: 2, 9: 1}, num_trained_tokens=35))
    for metrics in (resumed.metrics(), Ledger(file).metrics()):
        episodes = {kind: metrics[f"ledger/episodes/{kind}"] for kind in ("issued", "trained", "undone", "in_flight")}
        assert episodes == {"issued": 12, "trained": 6, "undone": 4, "in_flight": 0}  # undone: those of step 3
        assert metrics["ledger/tokens/undone"] == 40 - 15
        assert metrics["ledger/tokens/generated"] == 40 + 40 + 50 - 15
    assert trained_problems(file) == {7: 4, 9: 2}


def test_resume_at_the_checkpoint_of_the_last_step_writes_nothing(tmp_path):
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger(file)
    ledger.issue(1, [7, 9], 2)
    ledger.settle(1, _settlement())
    ledger.issue(2, [7, 9], 2)
    before = file.read_text()
    Ledger(file).resume(1, {2: InFlight(num_problems=2, num_episodes=4, num_tokens=15)})
    assert file.read_text() == before


def test_missing_ledger_of_episodes_in_flight_is_an_error(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.issue(1, [7, 9], 2)
    ledger.settle(1, _settlement())
    with pytest.raises(CheckpointError, match=r"has episodes of step 2, but .*ledger.jsonl has no line of it"):
        ledger.resume(1, {2: InFlight(num_problems=2, num_episodes=4, num_tokens=15)})


@pytest.mark.parametrize("num_kept", [0, 2, 3])
def test_ledger_that_lost_lines_is_an_error_because_the_data_would_start_again(tmp_path, num_kept):
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger(file)
    for step in (1, 2):
        ledger.issue(step, [7, 9], 2)
        ledger.settle(step, _settlement())
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:num_kept]))
    lost = 1 if num_kept == 0 else 2
    with pytest.raises(CheckpointError, match=rf"has episodes of step {lost}, but .*restore the file"):
        Ledger(file).resume(2, {})
