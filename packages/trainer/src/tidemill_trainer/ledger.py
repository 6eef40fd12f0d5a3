"""The ledger of a run: where each episode and each sampled token ended."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidemill_trainer.checkpoints import CheckpointError


class LedgerError(RuntimeError):
    """Episodes or tokens are missing or counted twice; the message has the sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """Where the episodes of a step ended.

    Attributes:
        num_generated: tokens that the engines returned.
        trained: number of trained episodes for each row of the training data.
        num_trained_tokens: tokens with mask 1 in the batch.
        dropped, failed: (episodes, tokens) by reason. Tokens of failed attempts count even where a repetition of the
            episode succeeded, so there may be tokens without episodes.
    """

    num_generated: int
    trained: Mapping[int, int]
    num_trained_tokens: int
    dropped: Mapping[str, tuple[int, int]]
    failed: Mapping[str, tuple[int, int]]

    def sums(self) -> dict[str, tuple[int, int]]:
        """Return episodes and tokens of each kind."""
        return {
            "trained": (sum(self.trained.values()), self.num_trained_tokens),
            "dropped": _sum(self.dropped.values()),
            "failed": _sum(self.failed.values()),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A step that had started when a checkpoint was written.

    Attributes:
        num_problems: problems that were issued.
        num_episodes: their episodes.
        num_tokens: tokens of the episodes that are in the checkpoint.
    """

    num_problems: int
    num_episodes: int
    num_tokens: int


class Ledger:
    """Append-only record of a run in `ledger.jsonl`.

    Each step has a line "issued" before episodes of it start, and "settled" after the update. A line "resumed" undoes
    all steps after its own, except the episodes that the checkpoint has in flight: a resumed run repeats them.

    Args:
        file: the file, which may have lines of an interrupted run.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._issued = 0
        self._problems: dict[int, int] = {}
        self._open: dict[int, int] = {}  # episodes of each step that is not settled
        self._settled: dict[int, dict[str, tuple[int, int]]] = {}
        self._undone = 0, 0
        if file.is_file():
            _remove_incomplete_line(file)
        for line in read_ledger(file):
            self._apply(line)

    def issue(self, step: int, problems: Sequence[int], n: int) -> None:
        """Record that `n` episodes start for each of these rows of the training data."""
        self._append({"event": "issued", "step": step, "n": n, "problems": list(problems)})

    def settle(self, step: int, settlement: Settlement) -> None:
        """Record where the episodes of a step ended.

        Raises:
            LedgerError: the sums differ from the issued episodes or the generated tokens.
        """
        sums = settlement.sums()
        for position, (name, total) in enumerate(
            (("episodes issued", self._open[step]), ("tokens generated", settlement.num_generated))
        ):
            parts = {kind: values[position] for kind, values in sums.items()}
            if sum(parts.values()) != total:
                found = " + ".join(f"{count} {kind}" for kind, count in parts.items())
                raise LedgerError(
                    f"step {step}: expected every one of {total} {name} in exactly one place, found {found} = "
                    f"{sum(parts.values())}; this is an error of tidemill, please report it"
                )
        self._append(
            {
                "event": "settled",
                "step": step,
                "generated": settlement.num_generated,
                "problems": {str(row): count for row, count in settlement.trained.items()},
                "trained": sums["trained"],
                "dropped": settlement.dropped,
                "failed": settlement.failed,
            }
        )

    def resume(self, step: int, in_flight: Mapping[int, InFlight]) -> None:
        """Record that the run continues after `step`; what came later is undone.

        Args:
            step: step of the checkpoint.
            in_flight: the later steps that had started then.

        Raises:
            CheckpointError: the file has no line of these steps, or of one before.
        """
        lost = [number for number in range(1, step + 1) if number not in self._settled]
        missing = [number for number in in_flight if number not in self._open and number not in self._settled]
        if lost or missing:
            raise CheckpointError(
                f"the checkpoint has episodes of step {[*lost, *missing][0]}, but {self._file} has no line of it; "
                "restore the file, or remove the folder of the checkpoint to resume without it"
            )
        running = {number: count for number, count in self._open.items() if number > step}
        is_later = any(number > step for number in self._settled)
        if is_later or running != {number: each.num_episodes for number, each in in_flight.items()}:
            kept = {str(number): asdict(each) for number, each in in_flight.items()}
            self._append({"event": "resumed", "step": step, "in_flight": kept})

    @property
    def num_problems(self) -> int:
        """Problems issued so far, in steps that are not undone."""
        return sum(self._problems.values())

    def metrics(self) -> dict[str, float]:
        """Return the sums since the start of the run, over all kinds of places; they add up to what was issued."""
        kinds = ("trained", "dropped", "failed")
        sums = {kind: _sum(step[kind] for step in self._settled.values()) for kind in kinds} | {"undone": self._undone}
        episodes = {f"ledger/episodes/{kind}": float(values[0]) for kind, values in sums.items()}
        tokens = {f"ledger/tokens/{kind}": float(values[1]) for kind, values in sums.items()}
        return {
            "ledger/episodes/issued": float(self._issued),
            "ledger/episodes/in_flight": float(sum(self._open.values())),
            **episodes,
            "ledger/tokens/generated": sum(tokens.values()),
            **tokens,
        }

    def _append(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        self._apply(line)

    def _apply(self, line: Mapping[str, Any]) -> None:
        step = line["step"]
        if line["event"] == "issued":
            count = line["n"] * len(line["problems"])
            self._open[step] = self._open.get(step, 0) + count
            self._issued += count
            self._problems[step] = self._problems.get(step, 0) + len(line["problems"])
        elif line["event"] == "settled":
            del self._open[step]
            self._settled[step] = {
                "trained": tuple(line["trained"]),
                "dropped": _sum(line["dropped"].values()),
                "failed": _sum(line["failed"].values()),
            }
        else:
            kept = {int(number): InFlight(**each) for number, each in line.get("in_flight", {}).items()}
            settled = [sums for other, sums in self._settled.items() if other > step]
            undone = [values for sums in settled for values in sums.values()]
            running = [(count, 0) for other, count in self._open.items() if other > step]
            # Tokens of episodes in flight count when their step is settled, so only those of settled steps did so far.
            again = [
                (-each.num_episodes, -each.num_tokens * (number in self._settled)) for number, each in kept.items()
            ]
            self._undone = _sum([self._undone, *undone, *running, *again])
            self._settled = {other: sums for other, sums in self._settled.items() if other <= step}
            self._open = {other: count for other, count in self._open.items() if other <= step}
            self._open |= {number: each.num_episodes for number, each in kept.items()}
            self._problems = {other: count for other, count in self._problems.items() if other <= step}
            self._problems |= {number: each.num_problems for number, each in kept.items()}


def trained_problems(file: Path) -> Counter[int]:
    """Return how many episodes of each row of the training data were trained on, in steps that are not undone."""
    by_step: dict[int, dict[str, int]] = {}
    for line in read_ledger(file):
        if line["event"] == "settled":
            by_step[line["step"]] = line["problems"]
        elif line["event"] == "resumed":
            by_step = {step: rows for step, rows in by_step.items() if step <= line["step"]}
    counts: Counter[int] = Counter()
    for rows in by_step.values():
        counts.update({int(row): count for row, count in rows.items()})
    return counts


def _remove_incomplete_line(file: Path) -> None:
    """Remove what a killed process wrote after the last end of line."""
    content = file.read_bytes()
    os.truncate(file, content.rfind(b"\n") + 1)


def read_ledger(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ledger, without an incomplete last one of a killed run."""
    if file.is_file():
        with file.open() as lines:
            yield from (json.loads(line) for line in lines if line.endswith("\n"))


def _sum(values: Any) -> tuple[int, int]:
    pairs = list(values)
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
