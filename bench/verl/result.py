"""The result of a comparison: steps of both runs in the same phases, and their table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidemill_trainer.bench.phases import Spread
from tidemill_trainer.run_dir import RunDir

PHASES = {  # of `tidemill bench`, and of verl
    "generation and rewards": ("generation|waiting for the last episodes", "gen|reward"),
    "log-probs": ("log-probs", "old_log_prob"),
    "scores and advantages": ("scores and advantages", "adv"),
    "update": (
        "forward pass|backward pass|forward and backward pass|optimizer|rest of the update|"
        "onload and offload of the trainer",
        "update_actor",
    ),
    "weights to the engines": ("weight update|onload and offload of the engines", "update_weights"),
}
LENGTHS = ("prompt_length/mean", "response_length/min", "response_length/mean", "response_length/max")


def tidemill_steps(run: RunDir, bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return seconds, phases and lengths of each measured step of `tidemill bench`."""
    lines = {line["step"]: line for line in run.read_metrics() if line.get("phase", "rl") == "rl"}
    found = []
    for step in bench["steps"]:
        phases = {
            title: sum(step["phases"].get(name, 0.0) for name in names.split("|"))
            for title, (names, _) in PHASES.items()
        }
        found.append(_step(step["step"], step["rates"]["seconds"], phases, lines[step["step"]]))
    return found


def verl_steps(rows: Sequence[Mapping[str, Any]], warmup: int) -> list[dict[str, Any]]:
    """Return seconds, phases and lengths of each step of verl after `warmup`."""
    found = []
    for number in range(warmup, len(rows)):
        row, seconds = rows[number], rows[number]["end_s"] - rows[number - 1]["end_s"]
        phases = {
            title: sum(row.get(f"timing_s/{name}", 0.0) for name in names.split("|"))
            for title, (_, names) in PHASES.items()
        }
        found.append(_step(row["step"], seconds, phases, row))
    return found


def _step(step: int, seconds: float, phases: Mapping[str, float], metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        "phases": {**phases, "other": seconds - sum(phases.values())},
        "seconds": seconds,
        "tokens/s": metrics["perf/total_num_tokens"] / seconds,
        **{name: metrics[name] for name in LENGTHS},
    }


def table(tidemill: Sequence[Mapping[str, Any]], verl: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table: median, minimum and maximum of each phase, and the ratio of the medians."""
    yield f"{'seconds: median (minimum to maximum)':38}{'tidemill':28}{'verl':28}verl / tidemill"
    yield f"{'measured steps':38}{len(tidemill):<28}{len(verl):<28}"
    for name in (*PHASES, "other", "step", "tokens/s"):
        ours, theirs = (Spread.of([_value(step, name) for step in steps]) for steps in (tidemill, verl))
        ratio = f"{theirs.median / ours.median:.2f}" if ours.median > 0.005 else ""
        yield f"{name:38}{_text(ours):28}{_text(theirs):28}{ratio}"
    ours, theirs = (Spread.of([step["seconds"] for step in steps]) for steps in (tidemill, verl))
    yield (
        f"A step of verl takes {theirs.median / ours.median:.2f} times as long; its shortest one "
        f"{theirs.min / ours.max:.2f} times as long as the longest of tidemill."
    )


def warnings(tidemill: Sequence[Mapping[str, Any]], verl: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a warning for each step in which prompts or responses of both have different lengths."""
    for ours, theirs in zip(tidemill, verl, strict=False):  # verl may have been stopped
        for name in LENGTHS:
            if abs(ours[name] - theirs[name]) > 1e-3 * ours[name]:
                yield (
                    f"warning: {name} of step {ours['step']} is {ours[name]:.2f} with tidemill and {theirs[name]:.2f} "
                    "with verl; the times do not compare"
                )


def _value(step: Mapping[str, Any], name: str) -> float:
    return {**step["phases"], "step": step["seconds"], "tokens/s": step["tokens/s"]}[name]


def _text(spread: Spread) -> str:
    digits = 0 if spread.median >= 1000 else 2
    return f"{spread.median:,.{digits}f} ({spread.min:,.{digits}f} to {spread.max:,.{digits}f})"
