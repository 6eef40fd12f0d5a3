"""The training loop with real components: Ray actors, two FSDP2 ranks on gloo, and a stock SGLang engine."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file
from step_metrics import TIMES
from tidemill_trainer.batch_record import BatchRecord
from tidemill_trainer.config_file import save_config
from tidemill_trainer.episodes import EpisodeError
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.ledger import read_ledger, trained_problems
from tidemill_trainer.mismatch import MismatchError
from tidemill_trainer.progress import Progress
from tidemill_trainer.replay.generation import GenerationReplay, segments_of
from tidemill_trainer.replay.plan import replay_plan
from tidemill_trainer.replay.steps import repeat_steps
from tidemill_trainer.report import write_report
from tidemill_trainer.role_groups import RoleGroups
from tidemill_trainer.rollout.episode_file import load_episodes
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.trainer import Trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.ray, pytest.mark.sglang, pytest.mark.timeout(600), pytest.mark.xdist_group("cluster")]


@pytest.fixture(scope="module")
def train_in(cluster, make_config, quiet):
    """Train in a folder, from its newest checkpoint, or else from the cluster's current weights after a warm-up."""

    def train(path, *overrides, progress=quiet):
        config = make_config(*overrides)
        inputs = load_inputs(config, quiet)
        assert inputs.val is not None
        run = RunDir(path)
        result = Trainer(config, cluster, replace(inputs, val=inputs.val[:64]), run, progress).fit()
        return run, result

    return train


@pytest.fixture(scope="module")
def eight_steps(train_in, tmp_path_factory):
    return train_in(tmp_path_factory.mktemp("eight"))


@pytest.fixture
def warmed_up(eight_steps, tmp_path):
    """A folder with the checkpoint that `eight_steps` saved after its warm-up."""
    run, _ = eight_steps
    shutil.copytree(run.path / "checkpoints" / "step_000000", tmp_path / "checkpoints" / "step_000000")
    return tmp_path


_STALE = ("rollout.max_staleness=2", "algorithm.bypass_mode=true", "trainer.test_freq=0")


def _steps(run):
    return {row["step"]: row for row in run.read_metrics() if row["phase"] == "rl"}


def test_rollout_and_training_agree_at_every_step(eight_steps):
    steps = _steps(eight_steps[0])
    assert sorted(steps) == list(range(1, 9))
    for row in steps.values():
        assert 0 < row["rollout/log_prob_abs_diff/mean"] < 1e-4
        assert row["rollout/log_prob_abs_diff/max"] < 1e-3
        assert row["actor/grad_norm"] > 0
        assert row["weight_update/version"] == row["step"]


@pytest.mark.parametrize(
    "options",
    [["rollout.partial_rollout=true"], ["rollout.partial_rollout=false"], ["rollout.recompute_kv_cache=false"]],
)
def test_later_batches_are_generated_during_training_within_the_bound(train_in, warmed_up, options):
    """Rows of several steps run at the same time, and an update interrupts some of them."""
    run, _ = train_in(
        warmed_up,
        "rollout.max_staleness=2",
        "algorithm.bypass_mode=true",
        *options,
        "trainer.save_samples=16",
    )
    steps = _steps(run)
    assert sorted(steps) == list(range(1, 9))
    assert [steps[1]["staleness/max"], steps[2]["staleness/max"]] == [0, 1]
    assert max(row["staleness/max"] for row in steps.values()) <= 2
    ledger = list(read_ledger(run.ledger))
    order = [(line["event"], line["step"]) for line in ledger]
    for step in range(1, 9):  # the problems of the next two steps are issued before a step is trained
        assert order.index(("issued", min(step + 2, 8))) < order.index(("settled", step))
    assert steps[8]["ledger/episodes/in_flight"] == 0
    shown = [(sample["step"], row["versions"]) for sample in run.read_rollouts() for row in sample["rows"]]
    ages = [step - 1 - int(version) for step, versions in shown for version, _ in versions]
    assert min(ages) >= 0
    assert 0 < max(ages) <= 2


def test_resume_takes_over_finished_episodes_of_later_steps(train_in, warmed_up, tmp_path_factory):
    """Steps 5 and 6 have started when step 4 is saved; no problem is lost, repeated or accounted for twice."""
    run, _ = train_in(warmed_up, *_STALE)
    again = tmp_path_factory.mktemp("again")
    saved = again / "checkpoints" / "step_000004"
    shutil.copytree(run.path / "checkpoints" / "step_000004", saved)
    shutil.copy(run.ledger, again)
    in_flight = {path.stem: load_episodes(path) for path in (saved / "in_flight").iterdir()}
    assert sorted(in_flight) == ["000005", "000006"]
    assert not (run.path / "checkpoints" / "step_000008" / "in_flight").exists()
    resumed, _ = train_in(again, *_STALE, "trainer.save_samples=64")
    assert trained_problems(resumed.ledger) == trained_problems(run.ledger)
    last = _steps(resumed)[8]
    ended = sum(last[f"ledger/episodes/{kind}"] for kind in ("trained", "dropped", "failed", "undone"))
    assert ended == last["ledger/episodes/issued"] == 10 * 64
    assert last["ledger/episodes/undone"] == 2 * 64
    kept = in_flight["000005"][0]
    assert kept.rows is not None
    trained = {line["episode"]: line for line in resumed.read_rollouts() if line["step"] == 5}
    for summary in kept.summaries:
        [row] = trained[summary.task.name]["rows"]
        [number] = (kept.rows["episode"] == summary.task.number).nonzero().flatten().tolist()
        assert row["token_ids"] == kept.rows["input_ids"][number].tolist()
        assert [tuple(run) for run in row["versions"]] == list(kept.rows.non_tensor_batch["versions"][number])


def test_recorded_steps_are_replayed_bitwise_and_a_changed_record_is_found(
    train_in, warmed_up, make_config, cluster, quiet
):
    """The replay of steps 5 to 8 starts from the checkpoint of step 4. One log-prob of step 7 is then changed.

    The engine samples the tokens of versions 4 to 7 again, also those after an interruption by an update.
    """
    overrides = [*_STALE, "trainer.save_batches=true"]
    run, _ = train_in(warmed_up, *overrides)
    save_config(make_config(*overrides), run.config)
    groups = RoleGroups(make_config(*overrides), cluster.actor, cluster.roles)

    def replayed(steps, has_generation=False):
        plan, generation = replay_plan(run.path, steps, [], has_generation=has_generation), None
        if has_generation:
            generation = GenerationReplay(plan.config, run, plan.steps, cluster.engines, quiet)
        return repeat_steps(plan, groups, cluster.watch.waits, quiet, generation)

    assert list(replayed((5, 8))) == [5, 6, 7, 8]
    assert list(replayed((5, 8), has_generation=True)) == [5, 6, 7, 8]
    record = BatchRecord(run.batches)
    assert any(segment.version >= 4 for segment in segments_of(7, record.load(7).episodes))
    recorded = record.load(7)
    hashes = [tuple(record.load(step).weights["engine"]) for step in range(1, 9)]
    assert len({each for ranks in hashes for each in ranks}) == 2 * 8
    rows = recorded.episodes.rows
    assert rows is not None
    rows["rollout_log_probs"].values()[0] -= 1.0
    record.save(7, recorded)
    done = []
    with pytest.raises(MismatchError, match=r"^step 7 differs: .*the weights of the policy on rank 0 \(\w+, now \w+\)"):
        done.extend(replayed((6, 8)))
    with pytest.raises(MismatchError, match=r"^step 7, episode .*: log-probs differ by 1, more than 0.001$"):
        done.extend(replayed((6, 8), has_generation=True))
    rows["rollout_log_probs"].values()[0] += 1.0
    metrics = {**recorded.metrics, "actor/grad_norm": recorded.metrics["actor/grad_norm"] * 2}
    record.save(7, replace(recorded, metrics=metrics))
    with pytest.raises(MismatchError, match=r"^step 7 differs: actor/grad_norm was [\d.]+, is [\d.]+$"):
        done.extend(replayed((7, 7)))


@pytest.fixture
def in_turns(cluster, monkeypatch):
    """The engine releases its memory during training; on a CPU, SGLang has nothing to free."""
    monkeypatch.setattr(cluster.engines, "in_turns", True)
    yield
    cluster.episodes.resume()


def test_run_in_turns_equals_one_side_by_side(eight_steps, train_in, warmed_up, in_turns, cluster):
    run, _ = train_in(warmed_up)
    state = ray.get(cluster.engines.workers[0].queue.remote())  # after the checkpoint
    assert state == "0 unfinished requests; released: cuda_graph, kv_cache, weights"
    whole, again = _steps(eight_steps[0]), _steps(run)
    assert sorted(again) == sorted(whole)
    for step, row in whole.items():
        for name, value in row.items():
            if not name.startswith(("ledger/", *TIMES)):
                assert again[step][name] == value, (step, name)
    assert trained_problems(run.ledger) == trained_problems(eight_steps[0].ledger)


def test_unfinished_episodes_continue_in_the_next_turn_within_the_bound(train_in, warmed_up, in_turns):
    run, _ = train_in(warmed_up, "rollout.max_staleness=1", "algorithm.bypass_mode=true", "trainer.save_samples=16")
    steps = _steps(run)
    assert sorted(steps) == list(range(1, 9))
    assert steps[1]["staleness/max"] == 0
    assert max(row["staleness/max"] for row in steps.values()) == 1
    assert steps[8]["ledger/episodes/in_flight"] == 0


def test_metrics_have_verl_names_and_are_finite(eight_steps):
    row = _steps(eight_steps[0])[4]
    expected = {
        *(
            f"actor/{name}"
            for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm", "lr")
        ),
        *(f"critic/{name}/{kind}" for name in ("score", "rewards", "advantages") for kind in ("mean", "max", "min")),
        *(f"response_length/{kind}" for kind in ("mean", "max", "min", "clip_ratio")),
        *(f"prompt_length/{kind}" for kind in ("mean", "max", "min", "clip_ratio")),
        *(f"timing_s/{n}" for n in ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights")),
        "timing_s/save_checkpoint",
        "timing_s/testing",
        *(f"perf/{name}" for name in ("throughput", "total_num_tokens", "time_per_step", "max_memory_allocated_gb")),
        *(f"perf/{name}/actor" for name in ("tokens_per_s", "tflops", "mfu")),
        "val-core/addition/acc/mean@1",
        "reward/frac_zero_std_groups",
        *(f"weight_update/{name}" for name in ("seconds", "bytes", "gb_per_s", "version")),
    }
    assert expected <= row.keys()
    assert all(math.isfinite(value) for value in row.values() if not isinstance(value, str))
    assert row["prompt_length/mean"] == 6.0  # "12+34="
    assert row["perf/mfu/actor"] == pytest.approx(row["perf/tflops/actor"] / 0.5)
    assert row["perf/tokens_per_s/actor"] > 2 * row["perf/throughput"]  # both ranks, training phase only
    assert 0.1 < row["perf/max_memory_allocated_gb"] < 20


def test_one_optimizer_step_per_batch_is_on_policy(eight_steps):
    for row in _steps(eight_steps[0]).values():
        assert row["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
        assert row["actor/pg_clipfrac"] == 0.0


def test_each_mini_batch_is_one_optimizer_step(train_in, warmed_up, make_config):
    run, _ = train_in(warmed_up, "actor.ppo_mini_batch_size=4", "trainer.total_steps=1")
    row = _steps(run)[1]
    optimizer = make_config().optimizer
    assert row["actor/lr"] == pytest.approx(optimizer.lr * 1.5 / optimizer.lr_warmup_steps)  # the mean of two steps
    assert abs(row["actor/ppo_kl"]) > 1e-6  # the second step is off policy


def test_groups_with_equal_rewards_are_replaced_also_after_a_resume(train_in, warmed_up, make_config, tmp_path_factory):
    again = tmp_path_factory.mktemp("again")
    shutil.copytree(warmed_up / "checkpoints", again / "checkpoints")
    rewards = make_config().reward.function.replace(":right_digits", ":equal_for_half")
    filters = [f"reward.function={rewards}", "algorithm.filter_groups=score", "trainer.save_freq=1"]
    run, _ = train_in(warmed_up, *filters, "trainer.total_steps=2")
    for row in _steps(run).values():
        dropped = row["filter/num_equal_rewards"] + row["filter/num_surplus"]
        assert row["filter/num_groups"] == 8 + dropped > 8
        assert row["reward/frac_zero_std_groups"] == 0.0
    train_in(again, *filters, "trainer.total_steps=1")
    resumed, _ = train_in(again, *filters, "trainer.total_steps=2")
    assert trained_problems(resumed.ledger) == trained_problems(run.ledger)
    assert _steps(resumed)[2]["critic/rewards/mean"] == _steps(run)[2]["critic/rewards/mean"]


def test_greedy_baseline_is_one_more_episode_of_each_problem(train_in, warmed_up):
    run, _ = train_in(warmed_up, "algorithm.adv_estimator=remax", "trainer.total_steps=1")
    [settled] = [line for line in read_ledger(run.ledger) if line["event"] == "settled"]
    assert settled["dropped"]["greedy baseline"][0] == 8
    assert settled["trained"][0] == 8 * 8
    row = _steps(run)[1]
    assert row["critic/advantages/min"] < 0 < row["critic/advantages/max"]


def test_checkpoint_in_transformers_has_the_accuracy_of_the_engine(eight_steps, make_config):
    run, result = eight_steps
    folder = run.path / "checkpoints" / "step_000008" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    correct = 0
    rows = [json.loads(line) for line in Path(make_config().data.val_files[0]).read_text().splitlines()[:64]]
    for row in rows:
        ids = torch.tensor([tokenizer.encode(row["prompt"], add_special_tokens=False)])
        out = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        correct += tokenizer.decode(out, skip_special_tokens=True) == row["ground_truth"]
    assert correct / len(rows) == pytest.approx(result.accuracy, abs=1e-6)


def test_resume_equals_an_uninterrupted_run(eight_steps, train_in, tmp_path):
    run, _ = eight_steps
    shutil.copytree(run.path / "checkpoints" / "step_000004", tmp_path / "checkpoints" / "step_000004")
    for file in (run.metrics, run.ledger):
        shutil.copy(file, tmp_path)
    resumed, _ = train_in(tmp_path)
    whole, again = _steps(run), _steps(resumed)
    assert sorted(again) == sorted(whole)
    for step in range(5, 9):
        for name, value in whole[step].items():
            if not name.startswith(("ledger/", *TIMES)):
                assert again[step][name] == value, (step, name)
    assert trained_problems(resumed.ledger) == trained_problems(run.ledger)
    assert again[8]["ledger/episodes/undone"] == again[8]["ledger/episodes/issued"] - 8 * 64 == 4 * 64
    weights = [
        load_file(r.path / "checkpoints" / "step_000008" / "huggingface" / "model.safetensors") for r in (run, resumed)
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name


def test_run_whose_engine_is_killed_equals_an_uninterrupted_run(eight_steps, train_in, warmed_up, make_config, cluster):
    """The first reward of the run kills the engine, while episodes of step 1 wait for their tokens."""
    rewards = make_config().reward.function.replace(":right_digits", ":with_engine_death")
    victim = ray.get(cluster.engines.workers[0].tidemill_describe.remote()).pid
    before = cluster.engines.num_restarts
    Path(rewards.partition(":")[0]).with_name("victim").write_text(str(victim))
    run, _ = train_in(warmed_up, f"reward.function={rewards}")
    whole, again = _steps(eight_steps[0]), _steps(run)
    assert cluster.engines.num_restarts == before + 1
    assert ray.get(cluster.engines.workers[0].tidemill_describe.remote()).pid != victim
    assert [row["weight_update/version"] for row in again.values()] == list(range(1, 9))
    for step, row in whole.items():
        for name, value in row.items():
            if not name.startswith(("ledger/", "rollout/num_engine_restarts", *TIMES)):
                assert again[step][name] == value, (step, name)
    assert trained_problems(run.ledger) == trained_problems(eight_steps[0].ledger)


@pytest.mark.slow
def test_engine_that_dies_between_two_calls_has_the_weights_of_the_next_update(eight_steps, cluster):
    os.kill(ray.get(cluster.engines.workers[0].tidemill_describe.remote()).pid, signal.SIGKILL)
    cluster.engines.update_weights("after its death")
    assert ray.get(cluster.engines.workers[0].get_weight_version.remote()) == "after its death"


def test_failed_rewards_are_counted_and_the_run_continues(train_in, warmed_up, make_config):
    """One problem is never scored: its group is not trained on, and all others are."""
    run, result = train_in(warmed_up, _broken(make_config), "trainer.total_steps=1", "episode.max_error_share=0.5")
    assert result.steps == 1
    row = _steps(run)[1]
    assert row["reward/num_errors"] == row["episode/reason/ZeroDivisionError"] == 8
    assert row["episode/num_retries"] == 16
    assert row["ledger/episodes/trained"] == 56
    assert row["ledger/tokens/failed"] > 0
    assert row["actor/grad_norm"] > 0
    failed = [line for line in run.read_rollouts() if line["status"] == "environment_error"]
    assert all(line["score"] is None and line["rows"] == [] for line in failed)


def test_run_stops_when_too_many_episodes_fail(train_in, warmed_up, make_config):
    with pytest.raises(
        EpisodeError, match=r"step 1 failed, also when repeated: 8 times ZeroDivisionError.*max_error_share=0.1"
    ):
        train_in(warmed_up, _broken(make_config), "trainer.total_steps=1")


def test_step_with_a_single_sound_episode_is_trained_on(train_in, warmed_up, make_config):
    """Fewer rows than training workers; the validation has no sound episode at all."""
    run, result = train_in(
        warmed_up, _broken(make_config, "almost_all_broken"), "trainer.total_steps=1", "episode.max_error_share=1"
    )
    row = _steps(run)[1]
    assert (row["ledger/episodes/trained"], row["reward/num_errors"], row["val/num_errors"]) == (1, 63, 64)
    assert "val/accuracy" not in row
    assert result.steps == 1
    run.config.touch()
    write_report(run)


def test_resume_of_a_complete_run_says_why_it_trains_nothing(train_in, eight_steps, tmp_path, quiet, monkeypatch):
    shutil.copytree(eight_steps[0].path, tmp_path, dirs_exist_ok=True)
    accurate = eight_steps[0].metrics.read_text().replace('"val/accuracy": 0.0', '"val/accuracy": 0.5')
    (tmp_path / "metrics.jsonl").write_text(accurate)
    shown: list[str] = []
    monkeypatch.setattr(quiet, "warn", shown.append)
    for settings in ([], ["trainer.total_steps=9", "trainer.stop_at_accuracy=0.4"]):
        assert train_in(tmp_path, *settings)[1].steps == 8
    reasons = [text for text in shown if text.startswith("nothing to train: ")]
    assert "total_steps=8 is reached" in reasons[0]
    assert "stop_at_accuracy=0.4; raise it" in reasons[1]


class _Crash(Progress):
    """Stop the run when it reports the failed rewards of a step, before it writes the metrics of that step."""

    def warn(self, text):
        raise KeyboardInterrupt


def test_crash_between_checkpoint_and_metrics_loses_no_row(train_in, warmed_up, make_config, quiet):
    overrides = [_broken(make_config), "episode.max_error_share=0.5", "trainer.save_freq=1"]
    overrides += ["trainer.test_freq=0", "trainer.total_steps=2"]
    with pytest.raises(KeyboardInterrupt):
        train_in(warmed_up, *overrides, progress=_Crash(quiet.console))
    run, _ = train_in(warmed_up, *overrides)
    assert sorted(_steps(run)) == [1, 2]
    assert {row["step"] for row in run.read_rollouts()} == {1, 2}


def _broken(make_config, name="broken"):
    return f"reward.function={make_config().reward.function.replace('right_digits', name)}"
