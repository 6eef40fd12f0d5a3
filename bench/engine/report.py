"""Print and save the measurements."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.case import Case

MFU, SPEEDUP, HEAD_RATIO, EFFICIENCY = 0.45, 1.5, 1 / 8, 0.9
"""Goals: MFU (4b and 8b), speedup over the plain loop, fraction of its peak memory, fraction of linear scaling."""

_HEADER = (
    f"{'model':5} {'case':32} {'GPUs':>4} {'master':6} {'micro':>6} {'tokens/s':>9} {'per GPU':>8} {'TFLOP/s':>8} "
    f"{'MFU':>6} {'min - max':>13} {'peak GiB':>8} {'step s':>7} {'n':>2} {'first s':>7} {'loss':>7}"
)


class Report:
    """The results of all cases, printed and written after each case.

    Args:
        path: path of the JSON file; None writes none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._facts: dict[str, Any] = {}
        self._lines: list[str] = []
        self.results: list[tuple[Case, dict[str, Any]]] = []

    def fact(self, facts: dict[str, Any]) -> None:
        new = {name: value for name, value in facts.items() if self._facts.get(name) != value}
        if not new:
            return
        self._facts |= new
        self._print("# " + ", ".join(f"{name} {value}" for name, value in new.items()))

    def text(self, text: str) -> None:
        self._print(text)

    def heading(self) -> None:
        self._print(_HEADER)

    def add(self, case: Case, result: dict[str, Any]) -> None:
        """Add the result of a case, which may be an "error" or "out_of_memory"."""
        self.results.append((case, result))
        self._print(_line(case, result))

    def close(self) -> None:
        """Print the ratios between cases."""
        for line in [
            *self._heads(),
            *self._shares_of_peak(),
            *self._speedups(),
            *self._backends(),
            *self._efficiencies(),
        ]:
            self._print(line)

    def _print(self, text: str) -> None:
        print(text, flush=True)
        self._lines.append(text)
        if self._path is not None:
            cases = [
                {"case": case.key, "tokens": case.tokens, "micro_tokens": case.micro_tokens, **result}
                for case, result in self.results
            ]
            self._path.write_text(json.dumps({"facts": self._facts, "cases": cases, "printed": self._lines}, indent=1))

    def _heads(self) -> list[str]:
        lines = []
        for case, result in self.results:
            if result.get("fused_bytes"):
                ratio = result["fused_bytes"] / result["plain_bytes"]
                lines.append(
                    f"{case.model}: fused log-probs take {ratio:.3f} of the plain peak of extra memory, at most "
                    f"{HEAD_RATIO:.3f}: {_verdict(ratio <= HEAD_RATIO)}"
                )
        return lines

    def _shares_of_peak(self) -> list[str]:
        lines = []
        for num_gpus in sorted({case.num_gpus for case, _ in self.results}):
            for case, result in self._best("mfu", lambda case: "plain" not in case.words, num_gpus):
                goal = f", at least {MFU:.0%}: {_verdict(result['mfu'] >= MFU)}" if case.model in ("4b", "8b") else ""
                lines.append(f"{case.key}, masters {case.precision}: MFU {result['mfu']:.1%}{goal}")
        return lines

    def _speedups(self) -> list[str]:
        lines = []
        ours = {(c.model, c.precision): (c, r) for c, r in self._best("tokens_per_s", lambda c: "plain" not in c.words)}
        loops = self._best("tokens_per_s", lambda c: "plain" in c.words and "sorted" not in c.words)
        for case, slow in [*loops, *self._best("tokens_per_s", lambda c: {"plain", "sorted"} <= set(c.words))]:
            own, fast = ours.get((case.model, case.precision), (None, None))
            if own is not None and fast is not None:
                ratio = fast["tokens_per_s"] / slow["tokens_per_s"]
                goal = "" if "sorted" in case.words else f", at least {SPEEDUP}: {_verdict(ratio >= SPEEDUP)}"
                lines.append(
                    f"{case.model}, masters {case.precision}: {own.name} trains {ratio:.2f} times as many tokens/s as "
                    f"{case.name}{goal}"
                )
        return lines

    def _backends(self) -> list[str]:
        lines = []
        for num_gpus in sorted({case.num_gpus for case, _ in self.results}):
            best = {
                backend: self._best("tokens_per_s", lambda case, backend=backend: case.backend == backend, num_gpus)
                for backend in ("fsdp2", "megatron")
            }
            others = {(case.model, case.precision): (case, result) for case, result in best["fsdp2"]}
            for case, result in best["megatron"]:
                if (found := others.get((case.model, case.precision))) is not None:
                    ratio = result["tokens_per_s"] / found[1]["tokens_per_s"]
                    lines.append(f"{case.key}: trains {ratio:.2f} times as many tokens/s as {found[0].name}")
        return lines

    def _best(self, number: str, fits: Callable[[Case], bool], num_gpus: int = 1) -> list[tuple[Case, dict[str, Any]]]:
        """Return the case with the largest `number` for each model and precision on `num_gpus` GPUs."""
        best: dict[tuple[str, str], tuple[Case, dict[str, Any]]] = {}
        for case, result in self.results:
            if case.num_gpus == num_gpus and fits(case) and result.get(number) is not None:
                key = case.model, case.precision
                if key not in best or result[number] > best[key][1][number]:
                    best[key] = case, result
        return list(best.values())

    def _efficiencies(self) -> list[str]:
        lines = []
        alone = {(c.model, c.words): r for c, r in self.results if c.num_gpus == 1 and "tokens_per_s" in r}
        for case, result in self.results:
            one = alone.get((case.model, case.words))
            if case.num_gpus > 1 and "tokens_per_s" in result and one is not None:
                share = result["tokens_per_s"] / case.num_gpus / one["tokens_per_s"]
                is_goal = case.num_gpus == 4 and case.backend == "fsdp2"
                goal = f", at least {EFFICIENCY:.0%}: {_verdict(share >= EFFICIENCY)}" if is_goal else ""
                lines.append(f"{case.key}: {share:.1%} of what one GPU does, on each{goal}")
        return lines


def _verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "missed"


def _line(case: Case, result: dict[str, Any]) -> str:
    start = f"{case.model:5} {case.name:32} {case.num_gpus:4} "
    if "error" in result:
        return f"{start}failed: {result['error']}"
    if result.get("out_of_memory"):
        return f"{start}{case.precision:6} {case.micro_tokens:6} out of memory: {result['out_of_memory']}"
    if "fused_s" in result:
        return start + (
            f"{result['num_tokens']} tokens, forward and backward: fused {_gib(result['fused_bytes'])} GiB extra in "
            f"{result['fused_s'] * 1e3:.1f} ms, plain {_gib(result['plain_bytes'])} GiB in "
            f"{result['plain_s'] * 1e3:.1f} ms; largest difference {result['largest_difference']:.2g}"
        )
    load = result.get("expert_load")
    mfu, spread = "-", "-"
    if result["mfu"] is not None:
        mfu, spread = f"{result['mfu']:.1%}", " - ".join(f"{share:.1%}" for share in result["mfu_range"])
    return start + (
        f"{case.precision:6} {case.micro_tokens:6} {result['tokens_per_s']:9.0f} "
        f"{result['tokens_per_s'] / case.num_gpus:8.0f} {result['tflops']:8.1f} {mfu:>6} {spread:>13} "
        f"{_gib(result['peak_bytes']):>8} {result['step_s']:7.3f} {len(result['steps']):2} {result['first_s']:7.1f} "
        f"{result['loss']:7.3f}" + ("" if load is None else f"  busiest expert {load:.1f} x an equal share")
    )


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / (1 << 30):.2f}"
