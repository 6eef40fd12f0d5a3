import math
import re

import pytest
from tidemill_trainer.metrics import performance_metrics
from tidemill_trainer.report import write_report
from tidemill_trainer.run_dir import RunDir

_PERFORMANCE = {
    "perf/tokens_per_s": 100.0,
    "perf/tflops_per_rank": 40.0,
    "perf/mfu": 0.4,
    "perf/peak_memory_gib": 3.0,
    "perf/step_s": 1.0,
}


def test_report_is_one_file_and_escapes_model_output(tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text('[model]\npath = "<b>"\n')
    run.append_metrics({"step": 0, "phase": "rl", "val/accuracy": 0.25})
    run.append_metrics({"step": 1, "phase": "rl", "critic/score/mean": 0.5, "val/accuracy": 0.75})
    run.append_metrics({"step": 2, "phase": "rl", "critic/score/mean": 0.5, "actor/grad_norm": math.inf})
    row = {
        "step": 1,
        "prompt": "<script>alert(1)</script>",
        "response": "2",
        "ground_truth": "2",
        "score": 1.0,
        "acc": 1.0,
    }
    run.append_rollouts([row])
    write_report(run)
    page = run.report.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "2 steps, held-out accuracy 0.250 before and 0.750 after reinforcement learning" in page
    assert not re.search(r"(src|url)\s*[=(]|href=\"(?!#)", page)
    assert page.count("<svg") == 7


def test_report_shows_failed_rewards_and_the_demo_description_if_any(tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text("")
    run.append_metrics({"step": 1, "phase": "rl", "reward/num_errors": 0.0})
    write_report(run)
    assert "Failed rewards" not in run.report.read_text()
    run.append_metrics({"step": 2, "phase": "rl", "reward/num_errors": 3.0})
    run.about.parent.mkdir()
    run.about.write_text("from right <to> left")
    write_report(run)
    assert "Failed rewards" in run.report.read_text()
    assert "from right &lt;to&gt; left" in run.report.read_text()


def test_accuracy_that_is_not_finite_is_left_out_of_the_report(tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text("")
    for step, accuracy in enumerate([0.25, 0.5, math.nan]):
        run.append_metrics({"step": step, "phase": "rl", "val/accuracy": accuracy})
    write_report(run)
    assert "held-out accuracy 0.250 before and 0.500 after" in run.report.read_text()


@pytest.mark.parametrize(
    ("rows", "summary"),
    [
        ([{"step": 3, "phase": "rl", "val/accuracy": 0.5}], "3 steps, held-out accuracy 0.500 after step 3"),
        ([{"step": 0, "phase": "rl", "val/accuracy": 0.5}], "0 steps, held-out accuracy 0.500 after step 0"),
        ([{"step": 0, "val/loss": 3.0}, {"step": 7, "train/loss": 2.0, "train/grad_norm": 1.0}], "7 steps"),
    ],
)
def test_single_validation_is_not_compared_with_itself(tmp_path, rows, summary):
    run = RunDir(tmp_path)
    run.config.write_text("")
    for row in rows:
        run.append_metrics(row)
    write_report(run)
    assert summary in run.report.read_text()
    assert " before and " not in run.report.read_text()


def test_run_without_steps_has_a_report(tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text("")
    write_report(run)
    assert "0 steps" in run.report.read_text()


def test_report_shows_performance_only_if_the_engine_reports_it(tmp_path):
    for name, rows in (("with", performance_metrics([_PERFORMANCE])), ("without", {})):
        (tmp_path / name).mkdir()
        run = RunDir(tmp_path / name)
        run.config.write_text("")
        for step in (1, 2):
            run.append_metrics({"step": step, "phase": "rl", "critic/score/mean": 0.5} | rows)
        write_report(run)
        page = run.report.read_text()
        for title in ("Training speed", "Training MFU", "Peak training memory"):
            assert (title in page) is (name == "with")


def test_report_of_fine_tuning_shows_both_losses_and_no_episodes(tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text("")
    run.append_metrics({"step": 0, "val/loss": 3.0})
    run.append_metrics({"step": 1, "train/loss": 2.0, "train/grad_norm": 1.0, "val/loss": 1.5})
    write_report(run)
    page = run.report.read_text()
    assert "1 steps, validation loss 3.000 before and 1.500 after training" in page
    assert page.count("<svg") == 2
    assert "Episodes" not in page
