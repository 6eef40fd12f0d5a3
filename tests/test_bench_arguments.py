"""Benchmarks refuse invalid arguments before they start a run."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["presets.py", "grppo"], "unknown presets: grppo; the presets are "),
        (["memory.py", "--steps", "3"], "--steps must be >= 4, got 3"),
        (["engine.py", "--models", "0.6b,7b"], "unknown models 7b; use some of 0.6b, "),
    ],
)
def test_invalid_arguments_start_no_run(arguments, message):
    script, *rest = arguments
    done = subprocess.run([sys.executable, str(BENCH / script), *rest], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert message in done.stderr
