"""The benchmark of the copy kernel runs, and what it measures is right: it compares every case with torch."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench" / "copy_kernel.py"


def test_it_measures_all_cases():
    command = [sys.executable, str(BENCH), "--tiny", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[3:-1]
    assert len(lines) == 5 + 3 + 2 + 3
    assert all(float(line.split()[-2].rstrip("%")) > 0 for line in lines)
