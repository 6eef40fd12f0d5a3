"""A reward function that compares mathematical answers with the package math-verify, in a process of its own."""

import importlib.util
import json
import selectors
import subprocess
import sys
import threading
from typing import Any

_WORKER = """
import json, sys
results, sys.stdout = sys.stdout, sys.stderr
from math_verify import parse, verify
print("ready", file=results, flush=True)
for line in sys.stdin:
    gold, answer = json.loads(line)
    expected = parse(gold if "$" in gold or "boxed" in gold else "\\\\boxed{" + gold + "}")
    print(json.dumps(verify(expected, parse(answer)) if expected else None), file=results, flush=True)
"""
_START_TIMEOUT_S = 120.0


class MathVerify:
    """A reward function: 1.0 if the answer in a reply equals the ground truth mathematically, else 0.0.

    math-verify stops a comparison after 5 s, and the reply scores 0.0. For that it uses signals, which only a main
    thread receives. It runs in one process, which the first call starts, and which is replaced after a crash or a
    timeout; only the episode that caused it fails.

    Args:
        timeout_s: time limit for one answer.
    """

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("math_verify is missing; pip install 'tidemill-rollout[math-verify]'")
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        """Score a reply; see `RewardFn`.

        Raises:
            ValueError: the ground truth has no mathematical form.
            RuntimeError: the process crashed or did not answer in time.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                self._read_line(_START_TIMEOUT_S)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([str(ground_truth), solution_str]) + "\n")
            self._process.stdin.flush()
            is_equal = json.loads(self._read_line(self._timeout_s))
        if is_equal is None:
            raise ValueError(f"math-verify cannot parse the ground truth {ground_truth!r}")
        return float(is_equal)

    def close(self) -> None:
        """Stop the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read_line(self, timeout_s: float) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(timeout_s) else None
        if not line:
            code = None if line is None else self._process.wait(timeout_s)
            self.close()
            reason = f"returned no result within {timeout_s:g} s" if line is None else f"crashed with exit code {code}"
            raise RuntimeError(f"the process of math-verify {reason}; a new one serves the next answer")
        return line
