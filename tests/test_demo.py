"""The demos of the command `tidemill`, and the negative control."""

import json
import re

import pytest
from command_process import BACKENDS
from step_metrics import read_steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("cluster"),
]


def test_model_does_not_learn_from_shuffled_rewards(start, tmp_path):
    common = ["demo", f"trainer.run_dir={tmp_path}", "trainer.total_steps=100", "trainer.test_freq=100"]
    accuracy = {}
    for name, flags in (("real", []), ("shuffled", ["--shuffle-rewards"])):
        command = start(*common, f"trainer.name={name}", *flags)
        command.wait_for(r"rl +1 ")
        assert command.end(timeout_s=400) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        tested = [(row["step"], row["val/accuracy"]) for row in rows if "val/accuracy" in row]
        accuracy[name] = tested[-1][1] - [value for step, value in tested if step == 0][-1]
    assert accuracy["real"] > 0.2
    assert accuracy["shuffled"] < 0.05


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_demo_reaches_its_target_accuracy(start, tmp_path, backend):
    command = start("demo", *BACKENDS[backend], f"trainer.run_dir={tmp_path}", "trainer.name=demo")
    command.wait_for(r"rl +1 ")
    assert command.end(timeout_s=600) == 0
    steps = read_steps(tmp_path / "demo")
    before, after = map(float, re.findall(r"held-out accuracy went from (\d\.\d+) to (\d\.\d+)", command.output)[0])
    assert 0.2 <= before <= 0.6
    assert after >= 0.9
    assert abs(steps[1]["actor/ppo_kl"]) < 1e-6  # the first step is on policy
    assert steps[1]["actor/pg_clipfrac"] == 0.0
    assert all(row["rollout/log_prob_abs_diff/mean"] < 1e-4 for row in steps.values())
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000


def test_demo_tools_learns_to_call_the_tool_for_each_item(start, tmp_path):
    command = start("demo", "tools", f"trainer.run_dir={tmp_path}", "trainer.name=tools")
    command.wait_for(r"rl +1 ")
    assert command.end(timeout_s=600) == 0
    before, after = map(float, re.findall(r"held-out accuracy went from (\d\.\d+) to (\d\.\d+)", command.output)[0])
    assert before <= 0.6
    assert after >= 0.9
    steps = read_steps(tmp_path / "tools")
    calls = [row["episode/shop-3/num_tool_calls/mean"] for _, row in sorted(steps.items())]
    assert calls[-1] > calls[0] + 0.2
    for row in steps.values():
        assert row["rollout/trained_token_share"] == 1.0
        assert row["rollout/log_prob_abs_diff/mean"] < 1e-4
    samples = [json.loads(line) for line in (tmp_path / "tools" / "rollouts.jsonl").read_text().splitlines()]
    assert {len(row["turns"]) for sample in samples for row in sample["rows"]} >= {2, 3, 4}
    report = (tmp_path / "tools" / "report.html").read_text()
    assert "Turn 4 " in report
    assert "<b>scan</b> {&quot;item&quot;: " in report
