"""Ten runs in which a random process is killed at a random time; see `bench/chaos.py`."""

import subprocess
import sys
from pathlib import Path

import pytest
from tidemill_testing.nodes import why_no_nodes

BENCH = Path(__file__).parents[1] / "bench" / "chaos.py"

pytestmark = [
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes())),
]


def test_runs_with_a_random_kill_train_the_same_problems_and_leave_nothing():
    done = subprocess.run([sys.executable, str(BENCH), "--runs", "10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 runs, 0 with a fault" in done.stdout
