"""Run one task of a `verifiers` environment and print its reward.

This file is executed by the interpreter of the environment's own virtual environment, so it imports nothing of ours.
"""

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]
from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # type: ignore[import-not-found]


async def run(config: dict[str, Any], index: int) -> dict[str, float]:
    """Return the score and the metrics of a task."""
    env = load_environment(resolve_env_config(config))
    task = next(iter(env.taskset.include(idx=[f"{index}:{index + 1}"])), None)
    if task is None:
        raise SystemExit(f"the taskset {config['taskset']} has no task {index}")
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise SystemExit("\n".join(f"{error.type}: {error.message}" for error in errors))
    if len(episode.traces) != 1:
        raise SystemExit(f"expected an environment with one agent, got {len(episode.traces)} traces")
    trace = episode.traces[0]
    return {**{name: value for name, value in trace.metrics.items() if value is not None}, "score": trace.reward}


if __name__ == "__main__":
    problem = json.loads(sys.stdin.readline())
    print(json.dumps(asyncio.run(run(json.loads(sys.argv[1]), problem["extra_info"]["index"]))))  # noqa: T201
