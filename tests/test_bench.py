"""`tidemill bench` on the demo's model: a real run, whose figures add up."""

import json
from pathlib import Path

import pytest
from tidemill_trainer.cli import DEMO_CONFIG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("cluster"),
]


def test_bench_accounts_for_all_seconds_and_tokens(start, tmp_path):
    (tmp_path / "lengths.txt").write_text("2\n3\n6\n")
    command = start(
        *("bench", str(DEMO_CONFIG), "--steps", "3", "--warmup", "1", "--lengths", str(tmp_path / "lengths.txt")),
        *("data.train_batch_size=16", f"trainer.run_dir={tmp_path / 'runs'}", "trainer.name=it"),
    )
    assert command.end(timeout_s=400) == 0, command.output
    run: Path = tmp_path / "runs" / "it"
    result = json.loads((run / "bench.json").read_text())
    assert [step["step"] for step in result["steps"]] == [2, 3, 4]
    for step in result["steps"]:
        assert sum(step["phases"].values()) == pytest.approx(step["rates"]["seconds"])
        assert min(step["phases"].values()) > -1e-3
        assert {"generation", "forward pass", "backward pass", "optimizer", "weight update"} <= step["phases"].keys()
        tokens = step["tokens"]
        assert tokens["generated"] == tokens["trained"] + tokens["dropped"] + tokens["failed"]
        assert 64 * 2 < tokens["generated"] < 64 * 6
    assert sum(result["phase_shares"].values()) == pytest.approx(1.0)
    lengths = result["response_length"]
    assert (lengths["min"], lengths["p50"], lengths["max"]) == (2.0, 3.0, 6.0)  # no end token stops a response
    assert {"actor_0", "actor_1", "episodes_0", "rollout_0"} < result["busy_cores"].keys()
    assert sum(result["busy_cores"].values()) > 0.2
    assert result["peak_memory_gib"]["the episodes"]["host"] > 0.5
    text = (run / "bench.md").read_text()
    assert "add up to 100.0%" in text
    assert text in (run / "bench.log").read_text()
    assert (run / "logs" / "rollout_0.log").is_file()
    assert not list(run.rglob("*.safetensors"))
