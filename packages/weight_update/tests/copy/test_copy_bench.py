"""The benchmark of the copy kernel runs, and what it measures is right: it compares every case with torch."""

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[4] / "bench" / "copy_kernel.py"


def test_it_measures_all_cases():
    command = [sys.executable, str(BENCH), "--tiny", "--repeats", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[3:-1]
    assert len(lines) == 5 + 3 + 2 + 3
    milliseconds = [float(line.split()[-5]) for line in lines]
    assert all(value > 0 for value in milliseconds)
