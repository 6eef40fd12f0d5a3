"""The command `tidemill`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

_RECIPES = Path(__file__).parent / "recipes"
DEMO_CONFIG = _RECIPES / "demo.toml"
BENCH_CONFIG = _RECIPES / "bench.toml"
DEMO_CONFIGS = {"addition": DEMO_CONFIG, "tools": _RECIPES / "demo_tools.toml", "sft": _RECIPES / "demo_sft.toml"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, 1 after an error, 2 for wrong arguments, 130 after Ctrl-C or SIGTERM.
    """
    args = _parse(argv)
    config: Path | None = getattr(args, "config", None)
    if config is not None and not os.path.lexists(config):  # before the imports
        sys.stderr.write(f"error: config file {config.absolute()} does not exist; check the path\n")
        return 1
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # until a run answers it with a report; by default it ends a process
    # Under `uv run`, Ray would build the whole environment again for its workers. Ray reads this when imported.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        if args.command == "engines":
            from tidemill_trainer.engines_command import engines

            return engines(args.run, args.action, args.argument)
        from tidemill_trainer import run  # imports torch, which takes seconds; --help stays fast

        overrides = [
            *args.overrides,
            *(["algorithm.shuffle_rewards=true"] if getattr(args, "shuffle_rewards", False) else []),
        ]
        if args.command == "demo":
            return run.demo(args.task, args.config or DEMO_CONFIGS[args.task], overrides)
        if args.command == "eval":
            return run.evaluate(args.target, overrides, n=args.n, greedy=args.n == 1 and not args.sample)
        if args.command == "plan":
            from tidemill_trainer.plan.command import plan

            memory, number = args.device_memory, args.num_gpus
            return plan(args.config, overrides, device_memory=memory, num_gpus=number, as_text=not args.json)
        if args.command == "bench":
            words = sys.argv[1:] if argv is None else argv
            more = {"steps": args.steps, "warmup": args.warmup, "lengths": args.lengths, "arguments": words}
            return run.bench(args.config, overrides, **more)
        if args.command == "replay":
            return run.replay(args.run, args.steps, overrides, has_generation=args.generation)
        if args.command == "doctor":
            from tidemill_trainer.doctor.command import doctor

            more = {"address": args.address, "cleans": args.clean, "compares_log_probs": args.log_probs}
            return doctor(args.config, overrides, **more)
        if args.command == "sft":
            return run.sft(args.config, overrides, resume=args.resume)
        return run.train(args.config, overrides, resume=args.resume)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; `key=value` may also follow an option, which argparse alone does not allow."""
    parser = _parser()
    args, others = parser.parse_known_args(argv)
    unknown = [other for other in others if other.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command == "engines":
        if others:
            parser.error(f"unrecognized arguments: {' '.join(others)}")
        return args
    args.overrides += others
    if args.command == "bench" and (args.config is None or "=" in str(args.config)):
        args.overrides = [*([] if args.config is None else [str(args.config)]), *args.overrides]
        args.config = BENCH_CONFIG
    if args.command == "demo":
        is_task = args.overrides and "=" not in args.overrides[0] and not args.overrides[0].endswith(".toml")
        args.task = args.overrides.pop(0) if is_task else "addition"
        if args.task not in DEMO_CONFIGS:
            parser.error(f"there is no demo {args.task!r}; the demos are: {', '.join(DEMO_CONFIGS)}")
    return args


def _count(text: str) -> int:
    """Return a number of at least 1; argparse reports the error of any other text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number >= 1, got {text!r}")
    return int(text)


def _steps(text: str) -> tuple[int, int]:
    """Return the two numbers of "3:8", or a single one twice; argparse reports the error of any other text."""
    first, _, last = text.partition(":")
    last = first if ":" not in text else last
    if not (first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        raise argparse.ArgumentTypeError(f"expected two steps such as 3:8, got {text!r}")
    return int(first), int(last)


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidemill", description="Train language models with reinforcement learning.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tidemill {version('tidemill-trainer')}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="train a tiny model on this machine, without a GPU or a download",
        usage="%(prog)s [-h] [--config CONFIG.toml] [--shuffle-rewards] [{addition,tools,sft}] [MORE.toml] "
        "[key=value ...]",
        description="addition (default): the model learns to add two numbers. tools: it learns to call a tool. "
        "sft: it learns the same from demonstrations alone.",
        allow_abbrev=False,
    )
    demo.add_argument(
        "--config",
        type=Path,
        metavar="CONFIG.toml",
        help="use this configuration instead of the built-in one",
    )
    train = commands.add_parser("train", help="train with your own configuration", allow_abbrev=False)
    sft = commands.add_parser(
        "sft", help="supervised fine-tuning on conversations, or DPO on preferences", allow_abbrev=False
    )
    for command in (train, sft):
        command.add_argument("config", type=Path, metavar="CONFIG.toml", help="configuration of the run")
        command.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    evaluate = commands.add_parser("eval", help="measure the accuracy of a model or checkpoint", allow_abbrev=False)
    evaluate.add_argument(
        "target",
        type=Path,
        metavar="CONFIG.toml|FOLDER",
        help="a configuration, or the folder of a run or of one of its checkpoints",
    )
    evaluate.add_argument("--n", type=_count, default=1, help="samples per problem (default: 1, greedy)")
    evaluate.add_argument("--sample", action="store_true", help="sample also with --n 1, instead of decoding greedily")
    plan, bench, replay = _add_plan(commands), _add_bench(commands), _add_replay(commands)
    doctor = _add_doctor(commands)
    _add_engines(commands)
    for command in (demo, train, sft, evaluate, plan, bench, replay, doctor):
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="MORE.toml | section.key=value",
            help="override configuration keys: those of another file, such as a preset of an algorithm, or one key",
        )
    for command in (demo, train):
        command.add_argument(
            "--shuffle-rewards",
            action="store_true",
            help="negative control: shuffle the rewards within each batch, so that the model cannot learn",
        )
    return parser


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    plan = commands.add_parser(
        "plan", help="show the memory and transfers that a configuration requires, without a GPU", allow_abbrev=False
    )
    plan.add_argument("config", type=Path, metavar="CONFIG.toml", help="configuration of `tidemill train` or `sft`")
    plan.add_argument(
        "--device-memory", metavar="SIZE", help="memory of a device, such as 139GiB (default: that of the GPU here)"
    )
    plan.add_argument(
        "--num-gpus", type=_count, help="GPUs of the cluster (default: those here, or else as many as are required)"
    )
    plan.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")
    return plan


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    replay = commands.add_parser(
        "replay", help="repeat recorded steps of a run, and compare the weights bit for bit", allow_abbrev=False
    )
    replay.add_argument("run", type=Path, metavar="RUN", help="folder of a run with trainer.save_batches=true")
    replay.add_argument(
        "--steps",
        type=_steps,
        metavar="FIRST:LAST",
        help="steps to repeat (default: all with a checkpoint before them)",
    )
    replay.add_argument(
        "--generation", action="store_true", help="also start engines, and compare the tokens that they sample again"
    )
    return replay


def _add_engines(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    engines = commands.add_parser(
        "engines", help="show the engines of a running job, add some or remove some", allow_abbrev=False
    )
    engines.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    engines.add_argument("action", nargs="?", choices=("list", "add", "remove"), default="list")
    engines.add_argument(
        "argument",
        nargs="?",
        metavar="N | NAME",
        help="number of engines to add, or to remove beginning with the newest (default: 1); or name of one to remove",
    )


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    bench = commands.add_parser(
        "bench",
        help="measure where the time of a step goes, with any configuration of a run",
        usage="%(prog)s [-h] [--steps N] [--warmup N] [--lengths LENGTHS] [CONFIG.toml] [MORE.toml] [key=value ...]",
        description="Train some steps and write bench.md and bench.json to the folder of the run. model.path may be "
        "the name of a model that is created with random weights: qwen2.5-0.5b, qwen3-0.6b, qwen3-1.7b, qwen3-4b, "
        "qwen3-8b, qwen3-30b-a3b, or tiny.",
        allow_abbrev=False,
    )
    bench.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG.toml", help="configuration (default: bench.toml)"
    )
    bench.add_argument("--steps", type=_count, default=5, help="measured steps (default: 5)")
    bench.add_argument("--warmup", type=_count, default=2, help="steps before them (default: 2)")
    bench.add_argument(
        "--lengths",
        help="lengths of the responses: a number, lognormal:MEAN,MAX, metrics.jsonl of a run, or a file with one "
        "number per line",
    )
    return bench


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine or all nodes of a cluster before a run, in less than a minute",
        usage="%(prog)s [-h] [--address HOST:PORT] [--log-probs] [--clean] [CONFIG.toml] [MORE.toml] [key=value ...]",
        allow_abbrev=False,
    )
    doctor.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="CONFIG.toml",
        help="configuration of a run (default: none)",
    )
    doctor.add_argument(
        "--address", metavar="HOST:PORT", help="Ray cluster (default: trainer.ray_address, or else this machine)"
    )
    doctor.add_argument(
        "--log-probs",
        action="store_true",
        help="also start an engine and the training workers, and compare their log-probs; takes minutes",
    )
    doctor.add_argument(
        "--clean", action="store_true", help="remove what dead runs left on each node, and do nothing else"
    )
    return doctor
