"""Measure training steps: tokens/s, MFU and peak memory of the engines and of a plain loop in the same run.

    python bench/engine.py --models 0.6b,1.7b,4b,8b              one GPU, all comparisons
    python bench/engine.py --models 4b --cases compile --gpus 1,2,4
    python bench/engine.py --models 4b,8b --cases compile,megatron+tp4,megatron+tp2+pp2,moe:megatron+ep4 --gpus 4
    python bench/engine.py --models 4b --cases compile --rows 16384,16384   long rows only
    python bench/engine.py --models tiny --device cpu             no GPU

A case is a list of the words below, joined with "+"; "base" is the empty list. Cases are separated by commas. A case
applies to every model, "moe:megatron+ep4" to one. Rows have 512 to 8,192 tokens (--rows), log-uniform, one eighth
prompt; weights are random. Each step draws new rows and divides them among the data-parallel ranks as tidemill-trainer
does; after two steps for warm-up, five are measured, and a line has the median of their rates, with the lowest and the
highest MFU. The work per GPU does not depend on the number of GPUs. MFU counts the operations that the model requires
(tidemill_engines.throughput): no recomputation, no padding, and the head for response tokens only. A line is printed
after each case, ratios at the end. If OUT is set, everything is also written to OUT/engine.json.
"""

import argparse
import os
import signal
import socket
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.case import DEFAULT_CASES, ENVIRONMENT, PATIENCE_S, SIZES, WORDS, Case, Effort, parse
from engine.report import Report
from engine.shapes import MODELS
from weight_update.supervisor import run_ranks

LIMIT_S = 540.0
START_S = 15.0
"""Start-up time of processes; no case is started if less than this and the time of a case is left."""


def main() -> int:
    """Run all cases; return 0 if every case was measured or ran out of memory."""
    parser = _parser()
    args = parser.parse_args()
    try:
        all_cases = [case for num_gpus in args.gpus for case in _cases(args, num_gpus)]
    except ValueError as error:
        parser.error(f"argument --cases: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the `finally` blocks that stop the ranks
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Keep compiled kernels between ranks, each of which has its own TMPDIR.
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"tidemill_inductor_{os.getuid()}"))
    )
    effort = Effort(
        steps=args.steps,
        repeats=args.repeat,
        rows=args.rows,
        case_s=args.case_s,
        profile=args.profile,
        device=args.device,
    )
    end = time.monotonic() + args.limit_s
    out = os.environ.get("OUT")
    report = Report(Path(out, "engine.json") if out else None)
    report.fact({"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]})
    report.heading()
    for _, alike in groupby(all_cases, lambda case: (case.num_gpus, case.environment)):
        cases = list(alike)
        while cases:
            cases = _run(cases, effort, report, end - time.monotonic())
    report.close()
    return 1 if any("error" in result for _, result in report.results) else 0


def _parser() -> argparse.ArgumentParser:
    sized = {f"{word}N": meaning for word, meaning in SIZES.items()}
    words = "\n".join(f"  {word:10} {meaning}" for word, meaning in (WORDS | sized).items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"words of cases:\n{words}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=_models, default=["0.6b", "1.7b", "4b", "8b"], help=", ".join(MODELS))
    parser.add_argument("--cases", type=_names, help="cases for every model, or MODEL:CASE; default: cases per model")
    parser.add_argument("--gpus", type=lambda text: [int(number) for number in text.split(",")], default=[1])
    parser.add_argument("--tokens", type=int, help="tokens per step and GPU")
    parser.add_argument("--micro-tokens", type=int, help="tokens per micro-batch and data-parallel rank")
    parser.add_argument("--steps", type=int, default=Effort().steps, help="number of measured steps")
    parser.add_argument("--repeat", action="store_true", help="use the same rows in all steps")
    parser.add_argument("--rows", type=_bounds, metavar="SHORTEST,LONGEST", help="tokens of a row")
    parser.add_argument("--case-s", type=float, default=Effort().case_s, help="start no further step after this time")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time limit of all cases")
    parser.add_argument("--profile", action="store_true", help="also profile one step")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=Effort().device)
    return parser


def _bounds(text: str) -> tuple[int, int]:
    shortest, comma, longest = text.partition(",")
    if not (comma and shortest.isdecimal() and longest.isdecimal() and 0 < int(shortest) <= int(longest)):
        raise argparse.ArgumentTypeError(f"expected SHORTEST,LONGEST, such as 512,8192, got {text!r}")
    return int(shortest), int(longest)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _models(text: str) -> list[str]:
    names = _names(text)
    if unknown := sorted(set(names) - set(MODELS)):
        raise argparse.ArgumentTypeError(f"unknown models {', '.join(unknown)}; use some of {', '.join(MODELS)}")
    return names


def _cases(args: argparse.Namespace, num_gpus: int) -> list[Case]:
    if args.cases is None:
        texts = [f"{model}:{words}" for model in args.models for words in DEFAULT_CASES[model].split(",")]
    else:
        texts = [f"{model}:{words}" for model in args.models for words in args.cases if ":" not in words]
        texts += [text for text in args.cases if ":" in text]
    sizes = {"tokens": args.tokens, "micro_tokens": args.micro_tokens, "longest": args.rows[1] if args.rows else 0}
    cases = [parse(text, num_gpus=num_gpus, **sizes) for text in texts]
    return [case for case in cases if num_gpus == 1 or not {"plain", "logprobs"} & set(case.words)]


def _run(cases: list[Case], effort: Effort, report: Report, limit_s: float) -> list[Case]:
    """Run cases in one set of processes until one crashes them, which is its result; return the remaining cases."""
    if limit_s < effort.case_s + START_S:
        for case in cases:
            report.add(case, {"error": "not run, time limit reached"})
        return []
    done = 0

    def on_message(kind: str, value: object) -> None:
        nonlocal done
        if kind == "fact":
            assert isinstance(value, dict)
            report.fact(value)
        elif kind == "text":
            report.text(str(value))
        elif kind == "result":
            assert isinstance(value, dict)
            report.add(cases[done], {name: item for name, item in value.items() if name != "number"})
            done += 1

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (cases, port, effort)
    try:
        run_ranks(_rank_main, cases[0].num_gpus, arguments, on_message, silence_s=PATIENCE_S, limit_s=limit_s)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        if done < len(cases):
            report.add(cases[done], {"error": str(error).strip().splitlines()[-1]})
            done += 1
    return cases[done:]


def _rank_main(*arguments: Any) -> None:
    from engine.session import run_rank  # here, since only ranks need torch

    run_rank(*arguments)


if __name__ == "__main__":
    sys.exit(main())
