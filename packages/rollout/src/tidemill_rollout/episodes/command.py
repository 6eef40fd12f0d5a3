"""An agent that is a command, in any language and with an interpreter of its own."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tidemill_rollout.episode import EpisodeFn
from tidemill_rollout.episodes.process import run_process
from tidemill_rollout.outcome import Outcome, to_outcome
from tidemill_rollout.problem import Problem
from tidemill_rollout.session import Session


def command(args: Sequence[str], *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None) -> EpisodeFn:
    """Return the episode that runs a command and reads the reward from the last line of its stdout.

    The command receives the problem as one JSON object on stdin; and as environment variables OPENAI_BASE_URL and
    OPENAI_API_KEY, which OpenAI's clients read, and TIDEMILL_SEED, the seed of the session. It prints a number or an
    object with "score". Only the last 64 KiB of stdout and of stderr are kept. When the episode ends, in whatever way,
    all processes of the command's process group are killed.

    Args:
        args: program and arguments, such as `["/path/to/venv/bin/python", "agent.py"]`.
        cwd: working directory.
        env: environment variables in addition to those of this process.
    """
    extra = {} if env is None else env

    async def episode(problem: Problem, session: Session) -> Outcome:
        if not session.base_url:
            raise RuntimeError("a command needs an endpoint; create the policy with Policy(..., endpoint=endpoint)")
        own = {"OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key}
        if session.seed is not None:
            own["TIDEMILL_SEED"] = str(session.seed)
        stdin = json.dumps(asdict(problem)).encode() + b"\n"
        try:
            result = await run_process(args, stdin=stdin, cwd=cwd, env={**os.environ, **extra, **own})
        except OSError as error:
            raise RuntimeError(f"cannot run {args[0]!r} in {cwd or os.getcwd()}: {error}") from error
        if result.code != 0:
            raise RuntimeError(f"{args[0]} failed with exit code {result.code}: {result.stderr.strip()[-1000:]}")
        line = result.stdout.strip().rpartition("\n")[2]
        try:
            return to_outcome(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f'expected a number or an object with "score" in the last line that {args[0]} prints, got '
                f"{line[-500:]!r}; stderr: {result.stderr.strip()[-500:]!r}"
            ) from error

    return episode
