"""Printed and saved results of the benchmark."""

import json
import statistics
from pathlib import Path
from typing import Any

from weight_update.case import Case
from weight_update.session import OURS, label

_COLUMNS = ("first", "median", "minimum")
_ABOUT = ("date", "gpu", "torch", "triton", "sglang", "weight_update", "python", "wall_s", "engine_start_s", "checked")


class Report:
    """The results of one case, saved after each message so that an aborted run keeps them.

    Args:
        path: path of the JSON file; None writes no file.
        facts: facts about the run.
    """

    def __init__(self, case: Case, path: Path | None, facts: dict[str, Any]) -> None:
        self.case = case
        self._path = path
        self.facts = dict(facts)
        self.timings: list[dict[str, Any]] = []
        self.floors: list[dict[str, Any]] = []
        self.error: str | None = None

    def on_message(self, kind: str, value: Any) -> None:
        """Process a message of a rank."""
        if kind == "fact":
            self.facts |= value
            print("  " + ", ".join(f"{k} {_short(v)}" for k, v in value.items()), flush=True)
        elif kind == "timing":
            self.timings.append(value)
            print("  " + self._line(value), flush=True)
        elif kind == "floor":
            self.floors.append(value)
        else:
            print(value, flush=True)
        self.save()

    def save(self) -> None:
        if self._path is not None:
            content = {
                "case": self.case.name,
                "facts": self.facts,
                "timings": self.timings,
                "floors": self.floors,
                "verdict": self.verdict(),
                "error": self.error,
            }
            self._path.write_text(json.dumps(content, indent=1))

    def table(self) -> str:
        """Return the table of all methods, followed by the stages of our update."""
        facts = self.facts
        layout = "" if self.case.layout is None else f" (Megatron, TP={self.case.layout.tp} x EP={self.case.layout.ep})"
        several = f"{self.case.num_engines} engines with " if self.case.num_engines > 1 else ""
        engine = f"{self.case.num_trainers} trainer ranks{layout} -> {several}TP={self.case.tp_size}"
        engine += " on other GPUs" if self.case.separate else " on the same GPUs"
        lines = [
            f"{self.case.name}: {facts.get('num_tensors')} tensors, {facts.get('num_bytes', 0) / 1e9:.4g} GB, "
            f"{engine if self.case.is_cuda else engine.replace('GPU', 'CPU')}",
            "  " + ", ".join(f"{name} {_short(value)}" for name, value in facts.items() if name in _ABOUT),
            f"  {'milliseconds':46}{'first':>9}{'median':>9}{'minimum':>9} {'n':>2} {'GB/s':>6}  ours is faster by",
        ]
        lines += ["  " + self._line(timing) for timing in self.timings]
        lines += [f"  {'floor':55}{floor['seconds'] * 1e3:9.2f}  {_floor_text(floor)}" for floor in self.floors]
        ours = self._timing(OURS)
        if ours is not None and ours["stats"]:
            lines.append("  stages of ours, first:   " + _stages(ours["first_stats"]))
            lines.append("  stages of ours, medians: " + _stages(ours["stats"]))
            lines.append(f"  a call of SGLang that does nothing: {facts['round_trip_s'] * 1e3:.2f} ms")
        return "\n".join(lines)

    def verdict(self) -> dict[str, Any]:
        """Return the ratios that the case measures; None where a number is missing."""
        ours, other = self._timing(OURS), self._timing(label(self.case.to_beat, self.case.buckets[1]))
        floor = self.floors[0]["seconds"] if self.floors else None
        speedup = other["median"] / ours["median"] if ours and other else None
        floor_ratio = ours["median"] / floor if ours and floor else None
        return {
            "ours_s": ours["median"] if ours else None,
            "floor_s": floor,
            "to_beat": label(self.case.to_beat, self.case.buckets[1]),
            "to_beat_s": other["median"] if other else None,
            "speedup": speedup,
            "speedup_wanted": self.case.speedup,
            "floor_ratio": floor_ratio,
            "floor_ratio_wanted": self.case.floor_ratio,
            "speedup_reached": None if speedup is None else speedup >= self.case.speedup,
            "floor_ratio_reached": None if floor_ratio is None else floor_ratio <= self.case.floor_ratio,
        }

    def summary(self) -> str:
        """Return one line for the final table."""
        verdict = self.verdict()
        if self.error is not None:
            return f"{self.case.name:14} failed"
        verdicts = {True: "reached", False: "missed", None: "not measured"}
        return (
            f"{self.case.name:14} ours {_ms(verdict['ours_s'])}, floor {_ms(verdict['floor_s'])}; "
            f"{_times(verdict['speedup'])} faster than {verdict['to_beat']} ({_ms(verdict['to_beat_s'])}), "
            f"wanted {self.case.speedup:g}x: {verdicts[verdict['speedup_reached']]}; "
            f"{_times(verdict['floor_ratio'])} the floor, at most {self.case.floor_ratio:g}x: "
            f"{verdicts[verdict['floor_ratio_reached']]}"
        )

    def _timing(self, method: str) -> dict[str, Any] | None:
        return next((timing for timing in self.timings if timing["method"] == method), None)

    def _line(self, timing: dict[str, Any]) -> str:
        ours = self._timing(OURS)
        rate = self.facts["num_bytes"] / 1e9 / timing["median"]
        line = f"{timing['method']:46}" + "".join(f"{timing[name] * 1e3:9.2f}" for name in _COLUMNS)
        line += f" {len(timing['repeats']):2} {rate:6.4g}"
        if ours is not None and ours is not timing:
            line += f"  {_times(timing['median'] / ours['median'])}"
        if timing["share"] != 1:
            line += f" (extrapolated from {timing['share']:.1%} of the tensors)"
        return line


def _stages(stats: list[dict[str, Any]]) -> str:
    total = statistics.median(s["seconds"] for s in stats)
    stages = [{n.removesuffix("_s"): v for n, v in s.items() if n.endswith("_s") and n != "engine_s"} for s in stats]
    return (
        f"total {total * 1e3:.2f} ms: {_shares(stages, total)}; {stats[0]['num_buckets']} buckets; "
        f"slowest engine rank: {_shares([s['engine_s'] for s in stats], total)}"
    )


def _shares(stages: list[dict[str, float]], total: float) -> str:
    names = dict.fromkeys(name for s in stages for name in s)
    medians = {name: statistics.median(s.get(name, 0.0) for s in stages) for name in names}
    return ", ".join(f"{name} {value * 1e3:.2f} ({value / total:.0%})" for name, value in medians.items())


def _floor_text(floor: dict[str, Any]) -> str:
    return f"{floor['what']}: {floor['num_bytes'] / 1e9:.4g} GB at {floor['bytes_per_s'] / 1e9:.0f} GB/s"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _times(ratio: float | None) -> str:
    return "?x" if ratio is None else f"{ratio:.3g}x"
