"""Tests of Triton kernels without a GPU."""

import os
import subprocess
import sys


def run_in_interpreter(file: str, tests: str) -> None:
    """Run tests in a process in which Triton interprets kernels on the CPU; fail if one fails or is skipped.

    Args:
        file: file of the tests.
        tests: expression of pytest's `-k` that selects them.
    """
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", tests, file],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout, run.stdout
