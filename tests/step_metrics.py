"""The lines of `metrics.jsonl` of the steps of reinforcement learning."""

import json
from pathlib import Path

TIMES = (
    "timing_s/",
    *(f"perf/{name}" for name in ("time_per_step", "throughput", "tokens_per_s", "tflops", "mfu", "max_memory")),
    *(f"perf/{name}" for name in ("step_s", "forward", "backward", "optimizer_s", "offload_s")),
    "rollout/release_s",
    "rollout/resume_s",
    "episode/seconds",
    "episode/addition/seconds",
    "weight_update/seconds",
    "weight_update/gb_per_s",
    "weight_update/offload_s",
)


def read_steps(run: Path) -> dict[int, dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if row["step"] > 0}
