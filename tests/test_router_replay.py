"""Training sends tokens where the rollout sent them, from stock SGLang through the trainer to Megatron's routers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def seen(request, tmp_path_factory):
    """What a run in processes of its own saw: Ray and the tests' own cluster may be running in this one."""
    folder = tmp_path_factory.mktemp("replay")
    script = Path(__file__).with_name("replay_run.py")
    command = [sys.executable, str(script), str(folder), request.param]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "seen.json").read_text()) | {"dtype": request.param}


def test_tokens_go_where_the_rollout_sent_them(seen):
    """The rollout in bfloat16 chooses otherwise than the trainer's routers would, so this sees whether they do."""
    replayed, free = seen["replayed"], seen["free"]
    assert replayed["choices"] > 1000
    assert replayed["unknown are the last"]
    assert replayed["chosen by a router"]
    assert replayed["other choices"] == 0
    if seen["dtype"] == "bfloat16":
        assert free["other experts"] > 0


def test_log_probs_of_rollout_and_training_are_no_further_apart(seen):
    replayed, free = seen["replayed"]["log_prob_abs_diff"], seen["free"]["log_prob_abs_diff"]
    if seen["dtype"] == "bfloat16":
        assert replayed < free
    else:
        assert replayed < 1e-5


@pytest.mark.parametrize("mode", ["R3", "R2"])
def test_a_run_trains_on_policy(seen, mode):
    apart = 1e-4 if seen["dtype"] == "float32" else 0.1
    assert len(seen[mode]) == 2
    for row in seen[mode]:
        assert row["rollout/log_prob_abs_diff/mean"] < apart
        assert abs(row["actor/ppo_kl"]) < 1e-6
        assert row["actor/grad_norm"] > 0


def test_old_log_probs_and_the_update_depend_on_the_experts_that_they_are_given(seen):
    """Other experts than the rollout's: the trainer hands on what it has."""
    for row, right in zip(seen["R3 shifted"], seen["R3"], strict=True):
        assert row["rollout/log_prob_abs_diff/mean"] > 3 * right["rollout/log_prob_abs_diff/mean"]
        assert abs(row["actor/ppo_kl"]) < 1e-6  # both were given the same
    for row in seen["R2 shifted"]:
        assert abs(row["actor/ppo_kl"]) > 1e-3  # only the update was
