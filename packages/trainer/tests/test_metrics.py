import io

import pytest
from rich.console import Console
from tidemill_trainer.metrics import mean_metrics, performance_metrics
from tidemill_trainer.progress import Progress
from tidemill_trainer.report import write_report
from tidemill_trainer.run_dir import RunDir

TOLD = {"perf/tokens_per_s": 100.0, "perf/tflops_per_rank": 40.0, "perf/peak_memory_gib": 3.0, "perf/step_s": 1.0}


def test_rates_of_several_steps_are_those_of_all_their_time():
    steps = [TOLD | {"perf/mfu": 0.4}, TOLD | {"perf/tokens_per_s": 20.0, "perf/mfu": 0.1, "perf/step_s": 3.0}]
    steps[1]["perf/peak_memory_gib"] = 2.0
    assert performance_metrics(steps) == {
        "perf/tokens_per_s/actor": pytest.approx((100.0 + 3 * 20.0) / 4),
        "perf/mfu/actor": pytest.approx((0.4 + 3 * 0.1) / 4),
        "perf/tflops/actor": pytest.approx(40.0),
        "perf/max_memory_allocated_gb": 3.0,
    }
    assert "perf/mfu/actor" not in performance_metrics([TOLD])
    assert performance_metrics([{"loss": 1.0}]) == {}


def test_metrics_are_means_and_skipped_steps_a_sum():
    steps = [{"actor/loss": 1.0, "actor/grad_nonfinite": 1.0} | TOLD, {"actor/loss": 2.0, "actor/grad_nonfinite": 1.0}]
    actual = mean_metrics([steps[0], steps[1] | TOLD])
    assert actual == {"actor/loss": 1.5, "actor/grad_nonfinite": 2.0} | performance_metrics([TOLD])
    assert not {"perf/step_s", "perf/tokens_per_s"} & actual.keys()


@pytest.mark.parametrize(("mfu", "shown"), [({"perf/mfu/actor": 0.4567}, "45.7%"), ({}, "")])
def test_the_line_of_a_step_shows_speed_below_its_heading(mfu, shown):
    text = io.StringIO()
    progress = Progress(Console(file=text, width=200))
    progress.step("rl", {"step": 3, "timing_s/step": 1.5, "perf/tokens_per_s/actor": 12345.6} | mfu, None)
    header, line = text.getvalue().splitlines()
    for title, value in (("s/step", "1.50"), ("tok/s", "12346"), ("MFU", shown)):
        end = header.index(title) + len(title)
        assert line[:end].endswith(value or " ")


def test_the_report_draws_what_the_engine_told(tmp_path):
    for name, rows in (("with", performance_metrics([TOLD | {"perf/mfu": 0.4}])), ("without", {})):
        (tmp_path / name).mkdir()
        run = RunDir(tmp_path / name)
        run.config.write_text("")
        for step in (1, 2):
            run.append_metrics({"step": step, "phase": "rl", "critic/score/mean": 0.5} | rows)
        write_report(run)
        page = run.report.read_text()
        for title in ("Training speed", "Training MFU", "Peak training memory"):
            assert (title in page) is (name == "with")
