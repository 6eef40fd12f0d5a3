from dataclasses import replace

import pytest
from tidemill_rollout import Outcome, Problem
from tidemill_trainer.episodes import EpisodeError
from tidemill_trainer.metrics import (
    episode_metrics,
    kind_of,
    mean_metrics,
    performance_metrics,
    reward_components,
    validation_metrics,
)
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary, EpisodeTask, Failure

RATES = {
    "perf/tokens_per_s": 100.0,
    "perf/tflops_per_rank": 40.0,
    "perf/peak_memory_gib": 3.0,
    "perf/step_s": 1.0,
}
FAILED = Outcome(reward=0.0, status="environment_error", reason="ValueError: x")


def test_rates_are_weighted_by_the_time_of_each_step():
    steps = [
        RATES | {"perf/mfu": 0.4},
        RATES | {"perf/tokens_per_s": 20.0, "perf/mfu": 0.1, "perf/step_s": 3.0, "perf/forward_s": 0.5},
    ]
    steps[1]["perf/peak_memory_gib"] = 2.0
    assert performance_metrics(steps) == {
        "perf/tokens_per_s/actor": pytest.approx((100.0 + 3 * 20.0) / 4),
        "perf/mfu/actor": pytest.approx((0.4 + 3 * 0.1) / 4),
        "perf/tflops/actor": pytest.approx(40.0),
        "perf/max_memory_allocated_gb": 3.0,
        "perf/step_s/actor": 4.0,
        "perf/forward_s/actor": 0.5,
    }
    assert "perf/mfu/actor" not in performance_metrics([RATES])
    assert performance_metrics([{"loss": 1.0}]) == {}


def test_metrics_are_averaged_and_skipped_steps_summed():
    steps = [
        {"actor/loss": 1.0, "actor/grad_nonfinite": 1.0} | RATES,
        {"actor/loss": 2.0, "actor/grad_nonfinite": 1.0},
    ]
    actual = mean_metrics([steps[0], steps[1] | RATES])
    assert actual == {"actor/loss": 1.5, "actor/grad_nonfinite": 2.0} | performance_metrics([RATES, RATES])
    assert not {"perf/step_s", "perf/tokens_per_s"} & actual.keys()


def _summary(number, outcome, *, source="sums", failures=(), **counts):
    task = EpisodeTask(number=number, problem=Problem(prompt="1+1=", id=str(number), data_source=source))
    return EpisodeSummary(task=task, outcome=outcome, failures=failures, counts=counts, seconds=1.0 + number)


def test_failed_episodes_do_not_lower_the_accuracy():
    right, wrong = Outcome(reward=0.2, metrics={"acc": 1.0}), Outcome(reward=0.0)
    summaries = [_summary(0, right), _summary(1, FAILED), _summary(2, wrong, source="other")]
    assert validation_metrics(summaries) == {
        "val/accuracy": 0.5,
        "val-core/sums/acc/mean@1": 1.0,
        "val-core/other/acc/mean@1": 0.0,
        "val/num_errors": 1.0,
    }


def test_validation_whose_episodes_all_failed_has_no_accuracy():
    assert validation_metrics([_summary(0, FAILED), _summary(1, FAILED)]) == {"val/num_errors": 2.0}


def test_components_of_an_episode_without_a_result_are_zero():
    complete = _summary(0, Outcome(reward=1.0, metrics={"acc": 1.0, "format": 0.5}))
    late = _summary(1, Outcome(reward=0.0, status="truncated", reason="time: no result"))
    assert reward_components([complete, late], ["acc", "format"]).tolist() == [[1.0, 0.5], [0.0, 0.0]]
    with pytest.raises(EpisodeError, match="but format is missing"):
        reward_components([_summary(0, Outcome(reward=1.0, metrics={"acc": 1.0}))], ["acc", "format"])


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("ValueError: x", "ValueError"), ("turns: no", "turns"), ("answer 17 is wrong", "answer"), ("", "unknown")],
)
def test_reasons_are_counted_by_their_first_word(reason, kind):
    assert kind_of(reason) == kind


def test_episodes_are_counted_by_status_reason_and_source():
    failures = [Failure(reason="ValueError: x", num_tokens=3)] * 2
    summaries = [
        _summary(0, Outcome(reward=1.0, metrics={"num_tool_calls": 2.0}), num_turns=3.0, num_sampled_tokens=8.0),
        _summary(
            1, Outcome(reward=0.0, status="truncated", reason="length: full"), num_turns=1.0, num_sampled_tokens=2.0
        ),
        _summary(2, FAILED, failures=failures, source="other"),
    ]
    episodes = Episodes(rows=None, summaries=summaries, num_generated=16, num_lost=0, num_restarts=1)
    metrics = episode_metrics(episodes, 5)
    assert metrics["episode/status/ok"] == metrics["episode/status/truncated"] == 1.0
    assert metrics["episode/reason/length"] == metrics["episode/reason/ValueError"] == 1.0
    assert (metrics["episode/num_retries"], metrics["episode/num_worker_restarts"]) == (1.0, 1.0)
    greedy = replace(episodes, baselines=[summaries[2]])
    assert episode_metrics(greedy, 5)["episode/num_retries"] == 2.0
    assert metrics["rollout/trained_token_share"] == 0.5
    assert metrics["episode/sums/num_tool_calls/mean"] == 2.0
    assert metrics["episode/sums/seconds/p50"] == 1.5
    assert (metrics["episode/seconds/p90"], metrics["episode/seconds/max"]) == (pytest.approx(2.8), 3.0)
    assert metrics["episode/sums/status/ok"] == metrics["episode/sums/status/truncated"] == 1.0
    assert metrics["episode/sums/status/environment_error"] == metrics["episode/other/status/ok"] == 0.0
    assert metrics["episode/other/status/environment_error"] == 1.0
