import re
from html import unescape

from tidemill_trainer.report.episode import Outcome, choose
from tidemill_trainer.report.tables import forks_html, ledger_table, outcome_tables


def rows_of(html):
    """Return the rows of all tables as lists of texts."""
    return [
        [unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", row, re.DOTALL)]
        for row in re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    ]


def outcome(step=1, source="sums", status="ok", reason="", seconds=1.0, turns=2.0):
    metrics = {"num_turns": turns, "num_sampled_tokens": 10 * turns}
    return Outcome(step=step, data_source=source, status=status, reason=reason, seconds=seconds, metrics=metrics)


def test_saved_episodes_are_counted_by_environment_status_and_first_word_of_the_reason():
    outcomes = [outcome(seconds=seconds) for seconds in (1.0, 2.0, 6.0)]
    outcomes += [outcome(status="truncated", reason=f"turns: {number} turns") for number in (8, 9)]
    outcomes += [outcome(source="a/b", turns=4.0)]
    rows = rows_of(outcome_tables(outcomes, []))
    assert rows[1:] == [
        ["a/b", "ok", "", "1", "1", "1", "1", "4", "40"],
        ["sums", "ok", "", "3", "3", "2", "5.6", "2", "20"],
        ["", "truncated", "turns", "2", "1", "1", "1", "2", "20"],
    ]


def test_all_episodes_are_counted_from_the_metrics():
    environment = {"episode/a/b/status/ok": 5.0, "episode/a/b/status/environment_error": 1.0}
    environment |= {"episode/a/b/seconds/p50": 1.0, "episode/a/b/seconds/p95": 3.0, "episode/a/b/num_turns/mean": 2.0}
    step = {"episode/status/ok": 5.0, "episode/status/environment_error": 1.0, "episode/reason/OSError": 1.0}
    metrics = [
        step | environment | {"episode/a/b/seconds/mean": mean, "episode/num_retries": 1.0} for mean in (1.0, 2.0)
    ]
    assert rows_of(outcome_tables([], metrics)) == [
        ["outcome", "number"],
        ["ok", "10"],
        ["environment_error", "2"],
        ["reason: OSError", "2"],
        ["retries", "2"],
        [
            "environment",
            "ok",
            "truncated",
            "model error",
            "environment error",
            "seconds: mean",
            "median",
            "p95",
            "turns",
        ],
        ["a/b", "10", "", "", "2", "1.5", "1", "3", "2"],
    ]


def test_ledger_shows_the_last_counts_and_what_they_do_not_account_for():
    first = {"ledger/episodes/issued": 5.0, "ledger/episodes/trained": 5.0}
    last = {"ledger/episodes/issued": 20.0, "ledger/episodes/trained": 12.0, "ledger/episodes/in_flight": 7.0}
    last |= {"ledger/tokens/generated": 100.0, "ledger/tokens/trained": 90.0, "ledger/tokens/dropped": 10.0}
    assert rows_of(ledger_table([first, last, {"x": 1.0}])) == [
        ["", "total", "trained", "in flight", "dropped", "unaccounted for"],
        ["episodes", "20", "12", "7", "", "1"],
        ["tokens", "100", "90", "", "10", "0"],
    ]


def test_forks_are_counted_by_reason_with_the_first_example():
    forks = [
        {"step": step, "episode": "3-17/0", "reason": "edited", "expected": "<a>", "received": "b"} for step in (3, 4)
    ]
    metrics = [{"rollout/num_forks/edited": 2.0, "rollout/num_forks/tools": 0.0}, {"rollout/num_forks/shortened": 1.0}]
    assert rows_of(forks_html(forks, metrics * 2))[1:] == [
        ["edited", "4", "step 3, episode 3-17/0expected<a>receivedb"],
        ["shortened", "2", ""],
    ]


def test_run_without_environments_has_no_tables():
    metrics = [{"step": 1, "critic/score/mean": 0.5}]
    plain = Outcome.of({"step": 1})
    assert outcome_tables([plain], metrics) + ledger_table(metrics) + forks_html([], metrics) == ""


def test_chosen_episodes_are_spread_over_steps_and_over_the_episodes_of_a_step():
    few = [outcome(step=step) for step in range(1, 6) for _ in range(4)]
    assert choose(few) == set(range(20))
    chosen = choose([outcome(step=step) for step in range(1, 101) for _ in range(4)])
    assert len(chosen) == 40
    assert {0, 399} <= chosen
    chosen = choose([outcome(step=step) for step in range(1, 101) for _ in range(100)])
    assert len(chosen) == 40
    assert {number // 100 for number in chosen} == {0, 99}
    assert choose([]) == set()
