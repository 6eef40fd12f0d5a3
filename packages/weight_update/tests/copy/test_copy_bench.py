"""Benchmark of the copy kernel; it compares the result of every case with torch."""

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[4] / "bench" / "copy_kernel.py"


def test_copy_benchmark_runs_and_its_copies_equal_torch():
    command = [sys.executable, str(BENCH), "--tiny", "--repeats", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
