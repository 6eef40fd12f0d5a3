"""The terminal output of a run: one line per step, and the current activity."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

_SHORT = {
    "gen": "gen",
    "old_log_prob": "logp",
    "update_actor": "train",
    "update_weights": "sync",
    "testing": "test",
    "save_checkpoint": "save",
}
_HEADER = (
    f"{'stage':>6} {'step':>5} {'reward':>7} {'accuracy':>9} {'length':>7} {'s/step':>7} {'tok/s':>7} {'MFU':>5}   "
    "seconds per phase"
)
_SFT_HEADER = f"{'step':>5} {'epoch':>6} {'loss':>8} {'val loss':>9} {'s/step':>7} {'tok/s':>7} {'MFU':>5}"
_SFT_EVERY_S = 2.0


class Progress:
    """Print progress to `console`, which need not be a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = Console() if console is None else console
        self._started = time.monotonic()
        self._header_shown = False
        self._last_line = -math.inf

    def seconds(self) -> float:
        """Return the seconds since this object was created."""
        return time.monotonic() - self._started

    def info(self, text: str, style: str = "default") -> None:
        self._print(f"[{style}]{escape(text)}[/]")

    def warn(self, text: str) -> None:
        self._print(f"[yellow]{escape(text)}[/]")

    def _print(self, markup: str) -> None:
        self.console.print(f"[dim]{self.seconds():5.0f} s[/]  {markup}", highlight=False, soft_wrap=True)

    def fail(self, text: str) -> None:
        """Print an error that stops the run to standard error."""
        Console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def stop(self, text: str) -> None:
        """Print to standard error that the user stopped the run."""
        Console(stderr=True).print(f"[bold]stopped.[/] {escape(text)}", highlight=False, soft_wrap=True)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show a spinner during the block, and its duration afterwards."""
        started = time.monotonic()
        with self.console.status(f"{text} …"):
            yield
        self.info(f"{text}: {time.monotonic() - started:.1f} s")

    def step(self, stage: str, metrics: Mapping[str, float], accuracy: float | None) -> None:
        """Print one line for a step. The MFU is that of the training phase alone.

        Args:
            stage: "sft" or "rl".
            metrics: metrics of the step, with their names in metrics.jsonl.
            accuracy: held-out accuracy; None if the step was not validated.
        """
        if not self._header_shown:
            self.console.print(f"         {_HEADER}", style="bold", highlight=False, soft_wrap=True)
            self._header_shown = True
        reward = metrics.get("critic/score/mean")
        length = metrics.get("response_length/mean")
        phases = "  ".join(
            f"{short} {metrics[f'timing_s/{phase}']:.2f}"
            for phase, short in _SHORT.items()
            if f"timing_s/{phase}" in metrics
        )
        seconds, mfu = metrics["timing_s/step"], metrics.get("perf/mfu/actor")
        tokens_per_s = metrics.get("perf/tokens_per_s/actor")
        if "perf/total_num_tokens" in metrics:  # not in the warm-up, which only trains
            tokens_per_s = metrics["perf/total_num_tokens"] / seconds
        self._print(
            f"{stage:>6} {int(metrics['step']):>5} {_number(reward, 3):>7} "
            f"[bold green]{_number(accuracy, 3):>9}[/] {_number(length, 1):>7} "
            f"{seconds:>7.2f} {_number(tokens_per_s, 0):>7} {_number(None if mfu is None else 100 * mfu, 1, '%'):>5}   "
            f"[dim]{phases}[/]"
        )

    def sft_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one line for a step of `tidemill sft`, at most every 2 s unless it was validated.

        Args:
            step: number of the step.
            metrics: its metrics, with their names in metrics.jsonl.
        """
        if "val/loss" not in metrics and self.seconds() < self._last_line + _SFT_EVERY_S:
            return
        self._last_line = self.seconds()
        if not self._header_shown:
            self.console.print(f"         {_SFT_HEADER}", style="bold", highlight=False, soft_wrap=True)
            self._header_shown = True
        mfu = metrics.get("perf/mfu/actor")
        self._print(
            f"{step:>5} {_number(metrics.get('train/epoch'), 2):>6} {_number(metrics.get('train/loss'), 4):>8} "
            f"[bold green]{_number(metrics.get('val/loss'), 4):>9}[/] {_number(metrics.get('timing_s/step'), 2):>7} "
            f"{_number(metrics.get('perf/tokens_per_s/actor'), 0):>7} "
            f"{_number(None if mfu is None else 100 * mfu, 1, '%'):>5}"
        )


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"
