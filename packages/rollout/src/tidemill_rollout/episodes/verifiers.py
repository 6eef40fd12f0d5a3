"""Environments of the package verifiers, in a virtual environment of their own.

verifiers cannot be installed next to SGLang: they require different versions of openai.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill_rollout.episode import EpisodeFn
from tidemill_rollout.episodes.command import command

_RUNNER = Path(__file__).with_name("verifiers_runner.py")
_LOCAL: Mapping[str, Any] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def verifiers_environment(
    python: str | Path,
    taskset: Mapping[str, Any],
    *,
    agent: Mapping[str, Any] = _LOCAL,
    env: Mapping[str, str] | None = None,
) -> EpisodeFn:
    """Return the episode that runs one task of a taskset; its reward is the sum of the task's weighted rewards.

    The index of the task is `problem.extra_info["index"]`; verifiers provides the prompt. Each episode is a process,
    which imports verifiers for a few seconds. `verifiers` 0.4 and `uv` are required in the virtual environment or on
    the PATH.

    Args:
        python: interpreter of the virtual environment, in which verifiers and the taskset are installed.
        taskset: configuration of the taskset with its "id", such as `{"id": "gsm8k-v1"}`.
        agent: configuration of the agent; default: verifiers' chat loop, in a process on this machine.
        env: environment variables in addition to those of this process.
    """
    config = {"taskset": dict(taskset), "agent": dict(agent)}
    # -P: without it, this folder's verifiers.py would be imported instead of the package.
    return command([str(python), "-P", str(_RUNNER), json.dumps(config)], env=env)
