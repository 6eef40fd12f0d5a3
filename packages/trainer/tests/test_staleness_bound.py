"""Any schedule of generation and training: no token is too old, and no problem is lost or repeated."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tidemill_dataproto import DataProto, ragged
from tidemill_rollout import Outcome
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import load_config
from tidemill_trainer.group_filter import joined
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.ledger import read_ledger, trained_problems
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary
from tidemill_trainer.rollouts import Rollouts
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.staleness import check_staleness

PROBLEMS, N, STEPS = 4, 2, 6


class SimulatedPool:
    """A pool whose tokens are sampled at random versions between the start of an episode and its end.

    Attributes:
        version: version of the engines' weights.
        collected: the finished episodes of each call of `collect`, by the id of their first problem.
        taken: those of each call of `wait`.
    """

    def __init__(self, seed, error_share):
        self._rng = np.random.default_rng(seed)
        self._error_share = error_share
        self.version = 0
        self.collected, self.taken = {}, {}

    def start(self, tasks, *, greedy, finished=None):
        return {"tasks": tasks, "version": self.version, "finished": finished}

    def wait(self, running):
        episodes = self._finish(running, running["tasks"])
        self.taken[_key(running)] = _versions(episodes)
        return episodes

    def collect(self, running):
        """Half of the episodes, on average, have finished."""
        episodes = self._finish(running, [task for task in running["tasks"] if self._rng.random() < 0.5])
        self.collected[_key(running)] = _versions(episodes)
        return episodes

    def _finish(self, running, tasks):
        done = running["finished"]
        numbers = set() if done is None else {summary.task.number for summary in done.summaries}
        episodes = self._run([task for task in tasks if task.number not in numbers], running["version"])
        if done is not None:
            both = joined([done, episodes])
            order = torch.argsort(both.rows["episode"]) if both.rows is not None else None
            summaries = sorted(both.summaries, key=lambda each: each.task.number)
            rows = None if both.rows is None or order is None else both.rows[order]
            episodes = replace(both, rows=rows, summaries=summaries)
        running["finished"] = episodes
        return episodes

    def _run(self, tasks, first):
        summaries, versions, numbers = [], [], []
        for task in tasks:
            lengths = self._rng.integers(0, 4, size=self.version - first + 1)
            lengths[-1] += 1  # at least one token
            count = float(lengths.sum())
            is_error = self._rng.random() < self._error_share
            outcome = Outcome(reward=float(self._rng.integers(2)))
            if is_error:
                outcome = Outcome(reward=0.0, status="environment_error", reason="simulated")
            else:
                runs = [(str(first + later), int(length)) for later, length in enumerate(lengths) if length]
                versions.append(runs)
                numbers.append(task.number)
            counts = {"num_sampled_tokens": count, "num_trained_tokens": count}
            counts |= {"num_unused_tokens": 0.0, "num_untrained_branch_tokens": 0.0}
            summaries.append(EpisodeSummary(task=task, outcome=outcome, counts={} if is_error else counts))
        column = np.empty(len(versions), dtype=object)
        column[:] = versions
        lengths = [sum(length for _, length in runs) for runs in versions]
        rows = DataProto.from_dict(
            {"episode": torch.tensor(numbers), "response_mask": ragged.ragged(torch.ones(sum(lengths)), lengths)},
            {"versions": column},
        )
        return Episodes(
            rows=rows if numbers else None,
            summaries=summaries,
            num_generated=sum(lengths),
            num_lost=0,
            num_restarts=0,
        )


def _key(running):
    return running["tasks"][0].problem.id


def _versions(episodes):
    """Return the versions of the tokens of each trainable episode."""
    if episodes.rows is None:
        return {}
    return dict(zip(episodes.rows["episode"].tolist(), episodes.rows.non_tensor_batch["versions"], strict=True))


@pytest.fixture(scope="module")
def run_steps(assets):
    """Run all steps; return the ledger's lines and trained problems."""
    inputs = {}

    def run(k, seed, error_share, *overrides, resumed_after=None):
        """`resumed_after`: a step after which the run is killed and continues from the checkpoint before it."""
        sizes = [f"data.train_batch_size={PROBLEMS}", f"rollout.n={N}", f"trainer.total_steps={STEPS}"]
        bound = [f"rollout.max_staleness={k}", "algorithm.bypass_mode=true", "episode.max_error_share=1.0"]
        config = load_config(DEMO_CONFIG, [*assets, *sizes, *bound, *overrides])
        with tempfile.TemporaryDirectory() as folder:
            run_dir, pool = RunDir(Path(folder)), SimulatedPool(seed, error_share)
            checkpoints = f"file://{folder}" if seed % 2 else folder  # a URL, or a path
            rollouts = Rollouts(config, pool, inputs["demo"], run_dir, inputs["progress"])
            step, finished = 0, {}
            while step < STEPS:
                step += 1
                episodes = rollouts.take(step)
                check_staleness(episodes.rows, step - 1, k)
                metrics = rollouts.settle(step, episodes, int(episodes.rows["response_mask"].values().sum()))
                ended = sum(metrics[f"ledger/episodes/{kind}"] for kind in ("trained", "dropped", "failed", "undone"))
                assert ended + metrics["ledger/episodes/in_flight"] == metrics["ledger/episodes/issued"]
                pool.version = step
                if step == resumed_after:  # as after a kill, from the checkpoint of the step before
                    resumed_after, step = None, step - 1
                    pool.version = step
                    finished = pool.collected
                    rollouts = Rollouts(config, pool, inputs["demo"], run_dir, inputs["progress"])
                    rollouts.resume(step, f"{checkpoints}/{step}")
                elif step + 1 == resumed_after:
                    rollouts.save(f"{checkpoints}/{step}")
            for problem, versions in finished.items():  # what had finished is trained on, and not generated again
                assert versions.items() <= pool.taken[problem].items()
            return list(read_ledger(run_dir.ledger)), trained_problems(run_dir.ledger)

    def prepare(progress):
        if not inputs:
            config = load_config(DEMO_CONFIG, [*assets])
            inputs.update(demo=load_inputs(config, progress), progress=progress)
        return run

    return prepare


_BOUNDS = st.integers(0, 5)
_SEEDS = st.integers(0, 2**31)


def test_no_token_is_too_old_and_no_problem_is_lost_or_repeated(run_steps, progress):
    run = run_steps(progress)
    ledger, _ = run(0, 0, 0.0)
    expected = Counter(row for line in ledger if line["event"] == "issued" for row in line["problems"])

    @given(k=_BOUNDS, seed=_SEEDS, resumed_after=st.none() | st.integers(1, STEPS))
    @settings(max_examples=100, deadline=None)
    def check(k, seed, resumed_after):
        _, trained = run(k, seed, 0.0, resumed_after=resumed_after)
        assert trained == Counter({row: N * count for row, count in expected.items()})

    check()


@given(
    k=_BOUNDS,
    seed=_SEEDS,
    error_share=st.floats(0, 0.3),
    has_filter=st.booleans(),
    resumed_after=st.none() | st.integers(1, STEPS),
)
@settings(max_examples=100, deadline=None)
def _check_sums(run, k, seed, error_share, has_filter, resumed_after):
    filtered = ["algorithm.filter_groups=acc", "algorithm.max_num_gen_batches=50"] if has_filter else []
    ledger, _ = run(k, seed, error_share, *filtered, resumed_after=resumed_after)
    num_repeated = 0 if resumed_after is None else 1
    assert sum(line["event"] == "settled" for line in ledger) == STEPS + num_repeated


def test_sums_balance_with_errors_and_dynamic_sampling(run_steps, progress):
    _check_sums(run_steps(progress))
