import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tidemill_rollout import Outcome, Problem
from tidemill_trainer.algorithm_config import RewardModelConfig
from tidemill_trainer.checkpoints import Checkpoints
from tidemill_trainer.cli import DEMO_CONFIG, main
from tidemill_trainer.config import RewardConfig
from tidemill_trainer.config_file import ConfigError, load_config, read_config, save_config
from tidemill_trainer.episodes import EpisodeError
from tidemill_trainer.evaluate import evaluation_config, write_results
from tidemill_trainer.evaluation import estimate, evaluate_summaries, pass_at_k
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary, EpisodeTask
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.sft.config import SFTConfig


@pytest.mark.parametrize(("n", "correct"), [(1, 0), (1, 1), (6, 0), (6, 2), (6, 6)])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_sample(n, correct):
    samples = [position < correct for position in range(n)]
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_interval_of_a_proportion_is_wilsons():
    found = estimate([1.0] * 8 + [0.0] * 2)
    assert (found.mean, found.num_problems) == (0.8, 10)
    assert (found.low, found.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert estimate([1.0] * 10).low == pytest.approx(0.7225, abs=1e-4)  # not [1, 1]


@pytest.mark.parametrize("value", [0.1, 0.2, 0.25, 0.3, 0.7])
def test_interval_of_equal_problems_has_a_width(value):
    for count in (3, 10):
        found = estimate([value] * count)
        assert found.low < value - 0.05
        assert found.high > value + 0.05


def test_interval_covers_the_true_mean_of_averaged_samples():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        rates = rng.beta(2, 1, size=60)  # the accuracy of each problem
        found = estimate(rng.binomial(8, rates) / 8)
        covered += found.low <= 2 / 3 <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def _summary(problem, acc, *, source="sums"):
    outcome = Outcome(reward=acc) if acc is not None else Outcome(reward=0.0, status="environment_error", reason="x")
    task = EpisodeTask(number=0, problem=Problem(prompt="1", id=problem, data_source=source))
    return EpisodeSummary(task=task, outcome=outcome)


def test_results_per_source_leave_failed_episodes_out():
    summaries = [_summary("a", 1.0), _summary("a", 0.0), _summary("b", 1.0), _summary("b", None)]
    summaries += [_summary("c", 0.0, source="other")] * 2
    results = evaluate_summaries(summaries, 2)
    assert results.keys() == {"sums", "other", "all"}
    assert (results["sums"]["num_episodes"], results["sums"]["num_failed"]) == (4, 1)
    assert results["sums"]["acc/mean@2"]["mean"] == 0.75
    assert results["sums"]["acc/pass@1"]["mean"] == 0.75
    assert results["sums"]["acc/pass@2"] == results["sums"]["acc/pass@2"] | {"mean": 1.0, "num_problems": 1}
    assert results["all"]["acc/mean@2"]["num_problems"] == 3


def test_source_named_all_keeps_its_results():
    results = evaluate_summaries([_summary("a", 1.0, source="all"), _summary("b", 0.0)], 1)
    means = {source: group["acc/mean@1"]["mean"] for source, group in results.items()}
    assert means == {"all": 1.0, "sums": 0.0, "all sources": 0.5}


def test_model_at_a_url_is_downloaded_to_the_folder_of_the_run(assets, tmp_path):
    run, url = tmp_path / "runs" / "mine", f"file://{tmp_path}/elsewhere"
    run.mkdir(parents=True)
    save_config(load_config(DEMO_CONFIG, [*assets, f"trainer.checkpoint_dir={url}"]), run / "config.toml")
    Checkpoints(f"{url}/mine", 1).save(7, lambda folder: None)
    model = tmp_path / "elsewhere" / "mine" / "step_000007" / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for name in ("config.json", "other.json"):  # the second download replaces the first
        (model / "config.json").rename(model / name)
        config, stem = evaluation_config(run, [])
        assert (config.model.path, config.trainer.checkpoint_dir) == (str(run / "downloads" / "step_000007"), None)
        assert [path.name for path in Path(config.model.path).iterdir()] == [name]
        assert stem == "eval-mine-step_000007"
    (model.parent / "trainer.json").unlink()
    with pytest.raises(ConfigError, match=r"the run .*mine has no checkpoint to evaluate"):
        evaluation_config(run, [])


def test_checkpoint_and_run_are_evaluated_with_the_configuration_of_their_run(assets, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "mine"
    (run / "assets").mkdir(parents=True)
    save_config(
        load_config(DEMO_CONFIG, [*assets, "trainer.name=mine", 'rollout.engine_args.load_format="dummy"']),
        run / "config.toml",
    )
    with pytest.raises(ConfigError, match=r"the run .*mine has no checkpoint to evaluate"):
        evaluation_config(run, [])
    checkpoint = Checkpoints(run / "checkpoints", 1).save(7, lambda folder: None)
    (Path(checkpoint) / "huggingface").mkdir()
    (Path(checkpoint) / "huggingface" / "config.json").touch()
    for target in (run, Path(checkpoint)):
        config, stem = evaluation_config(target, ["rollout.temperature=0.5"])
        assert config.model.path == f"{checkpoint}/huggingface"
        assert (config.rollout.temperature, config.trainer.name, config.warmup.max_steps) == (0.5, None, 0)
        assert stem == "eval-mine-step_000007"
        assert "load_format" not in config.rollout.engine_args
    monkeypatch.chdir(checkpoint)
    assert evaluation_config(Path(), [])[1] == evaluation_config(Path("../step_000007"), [])[1] == stem
    with pytest.raises(ConfigError, match="expected the folder of a run or of one of its checkpoints"):
        evaluation_config(tmp_path, [])
    with pytest.raises(ConfigError, match="runs/nothing does not exist; give the folder of a run or a config file"):
        evaluation_config(tmp_path / "runs/nothing", [])


def test_run_of_sft_is_refused_with_the_command_that_evaluates_it(tmp_path):
    run = tmp_path / "runs" / "S1"
    run.mkdir(parents=True)
    (tmp_path / "sft.toml").write_text('[model]\npath = "m"\n[data]\ntrain_files = ["a.jsonl"]\n')
    save_config(read_config(SFTConfig, tmp_path / "sft.toml"), run / "config.toml")
    checkpoint = Checkpoints(run / "checkpoints", 1).save(7, lambda folder: None)
    command = re.escape(f"tidemill eval CONFIG model.path={checkpoint}/huggingface")
    for target in (run, Path(checkpoint)):
        with pytest.raises(ConfigError, match=f"runs/S1 is a run of `tidemill sft`, .*: {command}$"):
            evaluation_config(target, ["rollout.temperature=0.5"])


@pytest.mark.parametrize("accuracies", [{"sums": None, "words": None}, {"sums": None, "words": 1.0}])
def test_source_whose_episodes_all_failed_is_shown_and_stops_the_evaluation(
    accuracies, assets, tmp_path, progress, terminal
):
    config = load_config(DEMO_CONFIG, assets)
    inputs = load_inputs(config, progress, has_training=False)
    summaries = [_summary(source, acc, source=source) for source, acc in accuracies.items()]
    episodes = Episodes(rows=None, summaries=summaries, num_generated=0, num_lost=0, num_restarts=0)
    run = RunDir(tmp_path)
    num_failed = list(accuracies.values()).count(None)
    message = rf"{num_failed} of 2 episodes of the evaluation failed, .* {num_failed} times x\. .*max_error_share=0\.1"
    for _ in range(2):  # the second evaluation in the same folder replaces the first
        with pytest.raises(EpisodeError, match=message):
            write_results(config, inputs, run, progress, episodes, n=1, greedy=True)
    assert re.search(r"sums +│ +│ +│ +│ +0 │ +1 of 1 ", terminal.getvalue())
    assert ("acc/pass@1" in terminal.getvalue()) == (accuracies["words"] is not None)
    assert json.loads((tmp_path / "results.json").read_text())["results"]["sums"] == {
        "num_episodes": 1,
        "num_failed": 1,
    }
    assert [row["reason"] for row in run.read_rollouts()] == ["x" if acc is None else "" for acc in accuracies.values()]


def test_evaluation_has_the_name_of_the_overrides_no_loggers_and_needs_no_training_files(assets, tmp_path, progress):
    file = tmp_path / "mine.toml"
    save_config(load_config(DEMO_CONFIG, [*assets, "trainer.name=mine", 'trainer.logger=["wandb"]']), file)
    config, _ = evaluation_config(file, ["trainer.name=other", "data.train_files=[]"])
    assert (config.trainer.name, config.trainer.logger) == ("other", ())
    assert load_inputs(config, progress, has_training=False).train is None


def test_evaluation_without_validation_files_is_rejected(tmp_path):
    (tmp_path / "mine.toml").write_text('[model]\npath = "m"\n')
    with pytest.raises(ConfigError, match=r"an evaluation requires data\.val_files"):
        evaluation_config(tmp_path / "mine.toml", [])


def test_evaluation_has_no_reward_model_and_requires_another_reward(assets, tmp_path):
    config = load_config(DEMO_CONFIG, [*assets, "reward_model.path=rm"])
    save_config(config, tmp_path / "sum.toml")
    assert evaluation_config(tmp_path / "sum.toml", [])[0].reward_model == RewardModelConfig()
    save_config(replace(config, reward=RewardConfig()), tmp_path / "alone.toml")
    with pytest.raises(ConfigError, match=r"runs no reward model; set reward\.function"):
        evaluation_config(tmp_path / "alone.toml", [])


@pytest.mark.parametrize("n", ["0", "-1", "many"])
def test_number_of_samples_is_checked(n, capfd):
    with pytest.raises(SystemExit):
        main(["eval", "mine.toml", f"--n={n}"])
    assert f"expected a number >= 1, got '{n}'" in capfd.readouterr().err
