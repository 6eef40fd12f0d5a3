"""Whether a run survives the death of any of its processes at any time.

    python bench/chaos.py             20 runs, about 40 minutes on two cores
    python bench/chaos.py --runs 100 --first-seed 1

Each run is that of the demo with a small batch: Ray, two FSDP2 ranks, an SGLang engine and an episode worker, on a node
of its own (namespaces of this machine, as root). A random process of the run is killed with SIGKILL at a random time,
half of them after the first checkpoint. First a kind of process is chosen, then one of that kind; in half of the runs
it is one of tidemill or SGLang, else any, such as Ray's. With --kind, it is this one where it exists. A command that
fails is continued with --resume, as by a user. The seed of a run decides the time, the kind of process among those that
exist then, and `rollout.max_staleness`.

Checked for each run, against one that nobody disturbs:
- the multiset of trained problems is equal; with staleness 0 also weights and metrics, bit for bit
- no command takes longer than --deadline
- no process, no shared memory and no temporary folder is left, and `tidemill doctor --clean` finds nothing

The exit status is 1 if a check fails. The folders of such runs are kept.
"""

import argparse
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file
from tidemill_testing.nodes import Node, start_nodes, why_no_nodes
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.demo import write_assets
from tidemill_trainer.ledger import trained_problems
from tidemill_trainer.run_dir import RunDir

NUM_STEPS = 24
STALENESS = (0, 2)
EXIT_S = 150.0  # Ray's agents take over a minute to exit after their driver was killed
SETTINGS = (
    *("data.train_batch_size=8", "rollout.n=4", "warmup.max_steps=5", "warmup.test_freq=0", "trainer.test_freq=0"),
    *(f"trainer.total_steps={NUM_STEPS}", "trainer.save_freq=3", "trainer.max_restarts=2"),
    *("algorithm.bypass_mode=true", "actor.timeout_s=240", "engine.timeout_s=120", "weight_update.timeout_s=60"),
    *("episode.timeout_s=120", "rollout.timeout_s=240"),
)
# Exact matches are too rare without a longer warm-up. With partial rewards, the groups have gradients.
REWARDS = """
def right_digits(data_source, solution_str, ground_truth, extra_info):
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / 3
"""
COUNTED = (  # times, and how often something was started again
    *("timing_s/", "perf/", "ledger/", "episode/seconds", "episode/addition/seconds"),
    *("weight_update/seconds", "weight_update/gb_per_s", "rollout/num_engine_restarts"),
    "episode/num_worker_restarts",
)
_NOTES = re.compile(r"error:|.*(started again|is replaced|Restart \d|did not respond)")
OWN = re.compile(r"driver|ray::\w+Worker$|sglang::")
KEPT_IN_TMP = {"ray"}  # Ray's logs


class FaultError(Exception):
    """A check failed."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What happened to a run.

    Attributes:
        seed: seed of the run.
        staleness: `rollout.max_staleness`.
        seconds: duration of all its commands.
        victim: kind of the process that was killed, after how many seconds, and the last line of the output before.
        ends: how each command ended.
        fault: the check that failed, or nothing.
    """

    seed: int
    staleness: int
    seconds: float = 0.0
    victim: str = "nothing"
    ends: list[str] = field(default_factory=list)
    fault: str = ""

    def __str__(self) -> str:
        result = f"FAULT: {self.fault}" if self.fault else "ok"
        start = f"seed {self.seed:3} k={self.staleness} {self.seconds:4.0f} s  {self.victim}"
        return f"{start}\n    {'; '.join([*self.ends, result])}"


def kind_of(process: psutil.Process) -> str | None:
    """Return the kind of a process, such as "ray::ActorWorker" or "raylet"; None if it has exited."""
    try:
        words = " ".join(process.cmdline()).split()
    except psutil.Error:
        return None
    if not words:
        return None
    if "::" in words[0]:
        return re.split(r"[.(_]", words[0])[0] if words[0].startswith("ray::") else re.split(r"_TP|_DP", words[0])[0]
    if "tidemill_trainer" in words:
        return "driver"
    if found := re.search(r"multiprocessing\.(\w+)", " ".join(words)):
        return found[1]
    scripts = [word for word in words if word.endswith(".py")]
    return "/".join(Path(scripts[0] if scripts else words[0]).parts[-2:]) if scripts else Path(words[0]).name


class Command:
    """`tidemill ...` on a node, with its output in a file.

    Args:
        node: where it runs.
        log: file of the output, to which it is added.
        cache: folder for what torch compiles, and for copy plans of weight updates.
        arguments: of the command.
    """

    def __init__(self, node: Node, log: Path, cache: Path, *arguments: str) -> None:
        self._log = log
        self._start = log.stat().st_size if log.exists() else 0
        command = (sys.executable, "-m", "tidemill_trainer", *arguments)
        env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(cache)}
        with log.open("a") as output:
            self.process = node.start(*command, stdout=output, stderr=subprocess.STDOUT, env=env)

    def output(self) -> str:
        return self._log.read_text()[self._start :]

    def finish(self, deadline_s: float, node: Node) -> int:
        """Return the exit status.

        Raises:
            FaultError: it did not exit in time. The folder of the run then has a report of the driver.
        """
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            for process in node.processes():
                if kind_of(process) == "driver":
                    process.send_signal(signal.SIGUSR1)
            time.sleep(60)
            raise FaultError(f"the command did not exit within {deadline_s:.0f} s: {self.last_line()}") from None

    def wait_for_checkpoint(self, run: RunDir) -> None:
        """Wait until the run has a checkpoint, or the command has exited."""
        while self.process.poll() is None and run.newest_checkpoint() is None:
            time.sleep(0.1)

    def last_line(self) -> str:
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        return " ".join(lines[-1].split())[:90] if lines else ""

    def end(self) -> str:
        """Return how it ended, in words: exit status, the replaced processes or the error."""
        lines = [re.sub(r"^ *\d+ s +", "", line).strip() for line in self.output().splitlines()]
        notes = [line[:160] for line in lines if re.match(_NOTES, line)]
        if not notes and self.process.returncode > 0:
            notes = [self.last_line()]
        return ": ".join([f"exit {self.process.returncode}", *notes[:2]])


class Bench:
    """The runs of this benchmark, and the one that they are compared with.

    Args:
        folder: folder of all runs.
        deadline_s: limit of each command.
        victim: kind of the process to kill; None: a random one.
    """

    def __init__(self, folder: Path, deadline_s: float, victim: str | None) -> None:
        self._folder = folder
        self._deadline_s = deadline_s
        self._victim = victim
        self._cache = folder / "cache"
        rewards = folder / "rewards.py"
        rewards.write_text(REWARDS)
        assets = write_assets(folder / "assets")
        runs = f"trainer.run_dir={folder / 'runs'}"
        self._arguments = [str(DEMO_CONFIG), *assets, *SETTINGS, f"reward.function={rewards}:right_digits", runs]
        self.expected = RunDir(folder / "runs" / "undisturbed")
        self.seconds = self._training_s = 0.0

    def run_undisturbed(self) -> None:
        """Run the one that all others are compared with, and measure its duration."""
        with self._node() as node:
            start = time.monotonic()
            command = self._start(node, self.expected.path.name, *self._arguments, "rollout.max_staleness=0")
            command.wait_for_checkpoint(self.expected)
            first_checkpoint = time.monotonic()
            if command.finish(self._deadline_s, node) != 0:
                raise RuntimeError(f"the undisturbed run failed:\n{command.output()}")
            self.seconds, self._training_s = time.monotonic() - start, time.monotonic() - first_checkpoint
            self._check_nothing_left(node)

    def disturb(self, seed: int) -> Outcome:
        """Run with a random kill, and check the result."""
        rng = random.Random(seed)
        outcome = Outcome(seed=seed, staleness=rng.choice(STALENESS))
        run = RunDir(self._folder / "runs" / f"seed-{seed}")
        with self._node() as node:
            start = time.monotonic()
            try:
                self._run(node, run, outcome, rng)
                outcome.seconds = time.monotonic() - start
                self._check_result(run, outcome.staleness)
                self._check_nothing_left(node)
            except FaultError as fault:
                outcome.fault = str(fault)
                outcome.seconds = outcome.seconds or time.monotonic() - start
                return outcome
        shutil.rmtree(run.path)
        return outcome

    def _run(self, node: Node, run: RunDir, outcome: Outcome, rng: random.Random) -> None:
        """Run with a kill, and resume the run if it has not ended."""
        arguments = [*self._arguments, f"rollout.max_staleness={outcome.staleness}"]
        command = self._start(node, run.path.name, *arguments)
        wait_s = rng.uniform(0, self.seconds)
        if rng.random() < 0.5:
            command.wait_for_checkpoint(run)
            wait_s = rng.uniform(0, self._training_s)
        with suppress(subprocess.TimeoutExpired):
            command.process.wait(wait_s)
        if command.process.poll() is None:
            outcome.victim = self._kill(node, command, rng)
        else:
            outcome.victim = f"nothing, it had ended: {command.last_line()}"
        status = command.finish(self._deadline_s, node)
        outcome.ends.append(command.end())
        if status == 0:
            return
        saved = run.newest_checkpoint()
        again = [str(run.config), "--resume"] if run.config.is_file() else arguments  # killed before it had a folder
        command = self._start(node, run.path.name, *again)
        if command.finish(self._deadline_s, node) != 0:
            raise FaultError(f"the run could not be continued: {command.end()}")
        outcome.ends.append(f"{'begun again' if saved is None else f'resumed after step {saved}'}: {command.end()}")

    def _kill(self, node: Node, command: Command, rng: random.Random) -> str:
        """Kill a random process; return its kind and when it was."""
        by_kind: dict[str, list[psutil.Process]] = defaultdict(list)
        for process in node.processes():
            if (kind := kind_of(process)) is not None:
                by_kind[kind].append(process)
        own = [kind for kind in by_kind if OWN.match(kind)]
        kind = rng.choice(sorted(own if own and rng.random() < 0.5 else by_kind))
        if self._victim in by_kind:
            kind = self._victim
        victim = rng.choice(sorted(by_kind[kind], key=lambda process: process.pid))
        age = time.time() - psutil.Process(command.process.pid).create_time()
        victim.kill()
        return f"killed {kind} after {age:.0f} s, after the line {command.last_line()!r}"

    def _start(self, node: Node, name: str, *arguments: str) -> Command:
        log = self._folder / f"{name}.log"
        return Command(node, log, self._cache, "train", *arguments, f"trainer.name={name}")

    @contextmanager
    def _node(self) -> Iterator[Node]:
        with start_nodes(1, shared=[self._folder]) as [node]:
            yield node

    def _check_result(self, run: RunDir, staleness: int) -> None:
        got, expected = trained_problems(run.ledger), trained_problems(self.expected.ledger)
        if got != expected:
            raise FaultError(f"other problems were trained: missing {expected - got}, surplus {got - expected}")
        if staleness == 0:
            _check_equal(self._weights(run), self._weights(self.expected))
            _check_equal(_metrics(run), _metrics(self.expected))

    def _weights(self, run: RunDir) -> dict[str, Any]:
        file = run.path / "checkpoints" / f"step_{NUM_STEPS:06d}" / "huggingface" / "model.safetensors"
        return {name: tensor.tolist() for name, tensor in load_file(file).items()}

    def _check_nothing_left(self, node: Node) -> None:
        deadline = time.monotonic() + EXIT_S
        while (alive := node.processes()) and time.monotonic() < deadline:
            time.sleep(0.5)
        if alive:
            raise FaultError(f"processes are left: {Counter(map(kind_of, alive))}")
        files = [line for line in node.run("ls", "-A", "/dev/shm", "/tmp").splitlines() if line and line[-1] != ":"]
        known = {*KEPT_IN_TMP, self._folder.relative_to("/tmp").parts[0], *Path(sys.prefix).parts}
        if left := sorted(set(files) - known):
            raise FaultError(f"files are left in /dev/shm or /tmp: {left}")
        clean = (sys.executable, "-m", "tidemill_trainer", "doctor", *self._arguments, "--clean")
        if "dead runs left nothing" not in (said := node.run(*clean, timeout_s=120)):
            raise FaultError(f"tidemill doctor --clean: {said}")


def _check_equal(got: dict[Any, Any], expected: dict[Any, Any]) -> None:
    names = sorted((got.keys() ^ expected.keys()) | {name for name in got if got[name] != expected.get(name)}, key=str)
    if names:
        raise FaultError(f"{len(names)} values differ from those of the undisturbed run, such as {names[:3]}")


def _metrics(run: RunDir) -> dict[tuple[int, str], Any]:
    rows = (row for row in run.read_metrics() if row["phase"] == "rl")
    return {(row["step"], name): row[name] for row in rows for name in row if not name.startswith(COUNTED)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="number of runs with a kill")
    parser.add_argument("--first-seed", type=int, default=1, help="seed of the first one; the next has the next seed")
    parser.add_argument("--kind", help="kind of the process to kill where one exists, such as driver")
    parser.add_argument("--deadline", type=float, default=600.0, help="limit of each command in seconds")
    arguments = parser.parse_args()
    if (reason := why_no_nodes()) is not None:
        parser.error(reason)
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    bench = Bench(folder, arguments.deadline, arguments.kind)
    bench.run_undisturbed()
    print(f"undisturbed: {bench.seconds:.0f} s, {NUM_STEPS} steps", flush=True)
    outcomes = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.runs):
        outcomes.append(bench.disturb(seed))
        print(outcomes[-1], flush=True)
    faults = [outcome for outcome in outcomes if outcome.fault]
    longest = max(outcome.seconds for outcome in outcomes)
    print(f"{len(outcomes)} runs, {len(faults)} with a fault; the longest took {longest:.0f} s")
    if faults:
        print(f"the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
