"""The command `tidemill`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

DEMO_CONFIG = Path(__file__).parent / "recipes" / "demo.toml"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, 1 after an error, 2 for wrong use, 130 after Ctrl-C or SIGTERM."""
    args = _parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    # Ray would see `uv run` and build the whole environment again for its workers. It reads this when it is imported.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        from tidemill_trainer import run  # importing torch takes seconds; --help should not

        overrides = [*args.overrides, *(["algorithm.shuffle_rewards=true"] if args.shuffle_rewards else [])]
        if args.command == "demo":
            return run.demo(args.config, overrides)
        return run.train(args.config, overrides, resume=args.resume)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """As argparse does, but `key=value` may come after an option, too."""
    parser = _parser()
    args, others = parser.parse_known_args(argv)
    unknown = [other for other in others if other.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.overrides += others
    return args


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidemill", description="Reinforcement learning for language models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tidemill {version('tidemill-trainer')}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo", help="train a tiny model on this machine, no GPU and no download needed", allow_abbrev=False
    )
    demo.add_argument(
        "--config",
        type=Path,
        default=DEMO_CONFIG,
        metavar="CONFIG.toml",
        help="another configuration than the demo's own",
    )
    train = commands.add_parser("train", help="train with your own configuration", allow_abbrev=False)
    train.add_argument("config", type=Path, metavar="CONFIG.toml")
    train.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    for command in (demo, train):
        command.add_argument("overrides", nargs="*", metavar="section.key=value", help="change the configuration")
        command.add_argument(
            "--shuffle-rewards", action="store_true", help="a negative control: with shuffled rewards nothing is learnt"
        )
    return parser
