"""Benchmark of weight updates: stock SGLang, this package, and the lower bound, with the same tensors in one run.

    python bench/weight_update.py --case moe1 --case dense1     one GPU
    python bench/weight_update.py --case dense1 --case dense1_fp8   the same model in float8 in the engine
    python bench/weight_update.py --case moe2 --case dense2     two GPUs
    python bench/weight_update.py --case dense2e2               two GPUs, two engines
    python bench/weight_update.py --case moe4 --case dense2x2   four GPUs
    python bench/weight_update.py --case moe4 --case megatron4  the same model from FSDP2 and from Megatron's layout
    python bench/weight_update.py --case moe8                   eight GPUs, two engines
    python bench/weight_update.py --case tiny                   no GPU
    python bench/weight_update.py --case moe4 --scale tiny      no GPU, two ranks instead of several
    python bench/weight_update.py --case moe8 --scale tiny      no GPU, two ranks, two engines

In moe8, FSDP2 shards the MoE of 31 GB over 8 ranks, and each update loads it into two engines with TP=4, on GPUs 0 to 3
and 4 to 7. In dense2e2, two ranks update two engines with TP=1. Each method updates all engines at the same time, and
the parameters of each engine are compared. With --only update_weights, SGLang's own update is the only stock method
whose time is measured, which saves minutes.

Prints a line per measurement, tables of all cases at the end, and the ratios last. If OUT is set, the results are also
written to OUT/weight_update_CASE.json during the run.

Stages of our update, on trainer rank 0: prepare (recognizes or describes the tensors), gather (stock path only), fill
(reads tensors for checksums and NaNs, and copies what cannot be read in place to shared memory), load (waits for
engines) and finish (sets the version). The rest of the total is control: agreement between the trainer ranks. Stages
within load, on the slowest engine rank: wait (for the trainer), declaration (reads it and maps memory), plan, check,
copy, finish, verify; the rest of load is control, too: the call through SGLang and back.

Requires tidemill_weight_update, tidemill_engines (for Megatron's layout) and SGLang; cases with GPUs need as many as
listed, with 139 GiB each. For dense2e2 and moe8, 80 GB should be enough: the weights of trainer and engine and the copy
that is compared take 41 and 20 GB per GPU.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
from weight_update.case import CASES, Case
from weight_update.report import Report
from weight_update.session import Effort, run_rank
from weight_update.supervisor import run_ranks

SILENCE_S = 120.0
LIMIT_S = 570.0


def main() -> int:
    """Run the cases.

    Returns:
        0 if everything was measured and arrived correctly, whether or not the target ratios were reached; 1 otherwise;
        2 if there are too few GPUs to start.
    """
    args = _arguments()
    cases = [CASES[name].tiny() if args.scale == "tiny" and name != "tiny" else CASES[name] for name in args.case]
    refused = _too_large(cases, torch.cuda.device_count())
    if refused:
        print(refused, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the `finally` blocks that kill the ranks
    effort = Effort(repeats=args.repeats, max_s=args.max_s, only=tuple(args.only))
    reports = []
    end = time.monotonic() + args.limit_s
    for case in cases:
        reports.append(_run(case, effort, args.silence_s, end - time.monotonic()))
    for report in reports:
        print("\n" + report.table())
    print("\n" + "\n".join(report.summary() for report in reports))
    return 0 if all(report.error is None for report in reports) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), required=True, help="may be repeated")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--repeats", type=int, default=Effort().repeats, help="updates of each method after its first")
    parser.add_argument(
        "--max-s", type=float, default=Effort().max_s, help="longest time per method; at least two repeats"
    )
    parser.add_argument("--only", action="append", default=[], help="measure stock methods that contain this text")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="longest time for all cases together")
    parser.add_argument("--silence-s", type=float, default=SILENCE_S, help="longest time without a message of a rank")
    return parser.parse_args()


def _too_large(cases: list[Case], num_gpus: int) -> str:
    """Return an error message if there are too few GPUs for some of these cases, else an empty string."""
    needed = ", ".join(f"{case.name} needs {case.num_gpus}" for case in cases if case.num_gpus > num_gpus)
    if not needed:
        return ""
    return f"too few GPUs: {needed}, {num_gpus} are visible; --scale tiny runs any case without one"


def _run(case: Case, effort: Effort, silence_s: float, limit_s: float) -> Report:
    out = os.environ.get("OUT")
    path = None if not out else Path(out, f"weight_update_{case.name.replace(' ', '_').strip('()')}.json")
    report = Report(case, path, {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]})
    started = time.monotonic()
    try:
        arguments = (case, effort)
        run_ranks(run_rank, case.num_trainers, arguments, report.on_message, silence_s=silence_s, limit_s=limit_s)
    except RuntimeError as error:
        report.error = str(error)
        print(f"{case.name} failed:\n{error}", file=sys.stderr, flush=True)
    report.facts["wall_s"] = time.monotonic() - started
    report.save()
    return report


if __name__ == "__main__":
    sys.exit(main())
