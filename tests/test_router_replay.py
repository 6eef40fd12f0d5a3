"""Router replay with real components: stock SGLang, the trainer and Megatron's routers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("cluster"),
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def seen(request, tmp_path_factory):
    """The results of `replay_run.py`, in a separate process because this one may have its own Ray cluster."""
    folder = tmp_path_factory.mktemp("replay")
    script = Path(__file__).with_name("replay_run.py")
    command = [sys.executable, str(script), str(folder), request.param]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "seen.json").read_text()) | {"dtype": request.param}


def test_training_uses_the_experts_of_the_rollout(seen):
    """In bfloat16 the routers of rollout and training choose different experts, so the test detects missing replay."""
    replayed, free = seen["replayed"], seen["free"]
    assert replayed["choices"] > 1000
    assert replayed["only_last_tokens_are_unknown"]
    assert replayed["unknown_are_filled"]
    assert replayed["different_choices"] == 0
    if seen["dtype"] == "bfloat16":
        assert free["different_experts"] > 0


def test_replay_reduces_the_log_prob_difference(seen):
    replayed, free = seen["replayed"]["log_prob_abs_diff"], seen["free"]["log_prob_abs_diff"]
    if seen["dtype"] == "bfloat16":
        assert replayed < free
    else:
        assert replayed < 1e-5


@pytest.mark.parametrize("mode", ["R3", "R2"])
def test_first_update_with_replay_has_ratio_one(seen, mode):
    tolerance = 1e-4 if seen["dtype"] == "float32" else 0.1
    assert len(seen[mode]) == 2
    for row in seen[mode]:
        assert row["rollout/log_prob_abs_diff/mean"] < tolerance
        assert abs(row["actor/ppo_kl"]) < 1e-6
        assert row["actor/grad_norm"] > 0


def test_old_log_probs_and_update_depend_on_the_given_experts(seen):
    """The trainer passes on whatever experts the batch has, so wrong experts change the results."""
    for row, correct in zip(seen["R3_shifted"], seen["R3"], strict=True):
        assert row["rollout/log_prob_abs_diff/mean"] > 3 * correct["rollout/log_prob_abs_diff/mean"]
        assert abs(row["actor/ppo_kl"]) < 1e-6  # old log-probs and update used the same wrong experts
    for row in seen["R2_shifted"]:
        assert abs(row["actor/ppo_kl"]) > 1e-3  # only the update used wrong experts
