"""The page of a benchmark, in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tidemill_trainer.bench.phases import NOTES

_SHARES = ("training MFU", "share of peak memory bandwidth while decoding")


def page(result: Mapping[str, Any]) -> str:
    """Return the page: which phase costs most, tables of phases and rates, and what the figures depend on."""
    slowest, share = next(iter(result["phase_shares"].items()))
    seconds = result["rates"]["seconds"]
    count, machine = len(result["steps"]), result["machine"]
    steps = [(step["rates"]["seconds"], step["rates"]["tokens/s"]) for step in result["steps"]]
    total_s = sum(step_s for step_s, _ in steps)
    tokens_per_s = sum(step_s * rate for step_s, rate in steps) / total_s
    where = (
        f"{result['num_gpus']:g} x {machine.get('gpu', 'GPU of unknown type')}"
        if result["num_gpus"]
        else f"{machine['cpus']} CPU cores"
    )
    lines = [
        f"# `{result['command']}`",
        "",
        f"{where}, {result['date']}, commit {result['commit'] or 'unknown'}. A step takes {total_s / count:.2f} s on "
        f"average (median {seconds['median']:.2f}, {seconds['min']:.2f} to {seconds['max']:.2f}; {count} steps after "
        f"{result['warmup_steps']} for warm-up), with {tokens_per_s:,.0f} tokens/s. Most of it is **{slowest}**: "
        f"{share:.1%}.",
        "",
        *_table(
            ("phase", "share", "median s", "min", "max", "note"),
            (
                (name, f"{part:.1%}", *_numbers(result["phase_seconds"][name], 3), NOTES.get(name, ""))
                for name, part in result["phase_shares"].items()
            ),
        ),
        f"The shares add up to {sum(result['phase_shares'].values()):.1%} of the time from the end of one step to the "
        "end of the next.",
        "",
        *_table(("per step", "median", "min", "max"), _rates(result)),
        *_table(("response length", "tokens"), ((name, f"{n:.1f}") for name, n in result["response_length"].items())),
        *_table(
            ("peak memory in GiB while the driver waits for", "fullest GPU", "host"),
            ((phase, _number(each.get("gpu"), 1), _number(each["host"], 1)) for phase, each in _peaks(result)),
        ),
        f"Tensors of the update, fullest rank: {result['peak_torch_gib_of_update']:.2f} GiB (on a CPU the process).",
        "",
        *_table(
            ("process on the driver's machine, with its descendants", "busy CPU cores"),
            ((name, f"{cores:.2f}") for name, cores in sorted(result["busy_cores"].items())),
        ),
        f"Seed {result['seed']}; engines and training workers: {result['placement']}; "
        + ", ".join(f"{name} {value}" for name, value in {**machine, **result["versions"]}.items() if value),
        "",
        "All figures of all steps are in `bench.json`, the configuration in `config.toml`, the output of this command "
        "in `bench.log` and of all processes in `logs/`.",
    ]
    return "\n".join(lines) + "\n"


def _rates(result: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    for name, spread in result["rates"].items():
        if name in _SHARES:
            yield name, *(["unknown"] * 3 if spread is None else [f"{spread[kind]:.1%}" for kind in _KINDS])
        elif name != "seconds":
            yield name, *_numbers(spread, 1)
    for kind, spread in result["tokens"].items():
        yield f"tokens {kind}", *_numbers(spread, 0)


_KINDS = ("median", "min", "max")


def _peaks(result: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, float]]]:
    return result["peak_memory_gib"].items()


def _numbers(spread: Mapping[str, float], digits: int) -> list[str]:
    return [_number(spread[kind], digits) for kind in _KINDS]


def _number(value: float | None, digits: int) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]
