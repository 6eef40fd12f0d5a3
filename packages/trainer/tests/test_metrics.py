import pytest
from tidemill_trainer.metrics import mean_metrics, performance_metrics

RATES = {
    "perf/tokens_per_s": 100.0,
    "perf/tflops_per_rank": 40.0,
    "perf/peak_memory_gib": 3.0,
    "perf/step_s": 1.0,
}


def test_rates_are_weighted_by_the_time_of_each_step():
    steps = [
        RATES | {"perf/mfu": 0.4},
        RATES | {"perf/tokens_per_s": 20.0, "perf/mfu": 0.1, "perf/step_s": 3.0},
    ]
    steps[1]["perf/peak_memory_gib"] = 2.0
    assert performance_metrics(steps) == {
        "perf/tokens_per_s/actor": pytest.approx((100.0 + 3 * 20.0) / 4),
        "perf/mfu/actor": pytest.approx((0.4 + 3 * 0.1) / 4),
        "perf/tflops/actor": pytest.approx(40.0),
        "perf/max_memory_allocated_gb": 3.0,
    }
    assert "perf/mfu/actor" not in performance_metrics([RATES])
    assert performance_metrics([{"loss": 1.0}]) == {}


def test_metrics_are_averaged_and_skipped_steps_summed():
    steps = [
        {"actor/loss": 1.0, "actor/grad_nonfinite": 1.0} | RATES,
        {"actor/loss": 2.0, "actor/grad_nonfinite": 1.0},
    ]
    actual = mean_metrics([steps[0], steps[1] | RATES])
    assert actual == {"actor/loss": 1.5, "actor/grad_nonfinite": 2.0} | performance_metrics([RATES])
    assert not {"perf/step_s", "perf/tokens_per_s"} & actual.keys()
