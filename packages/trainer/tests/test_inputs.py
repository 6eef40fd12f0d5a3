import json
import shutil
from dataclasses import replace

import pytest
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.data import DataError
from tidemill_trainer.inputs import load_inputs


def _load(assets, progress, *overrides):
    return load_inputs(load_config(DEMO_CONFIG, [*assets, *overrides]), progress)


def test_inputs_of_the_demo_are_loaded(assets, progress):
    inputs = _load(assets, progress)
    assert (len(inputs.train), len(inputs.val)) == (8192, 512)
    assert inputs.train.non_tensor_batch["prompt"][0].endswith("=")


def test_warm_up_requires_a_response_in_every_row(assets, progress, tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2"}) + "\n")
    file = f'data.train_files=["{tmp_path / "t.jsonl"}"]'
    with pytest.raises(DataError, match="the warm-up requires a `response` in every row"):
        _load(assets, progress, file)
    assert len(_load(assets, progress, file, "warmup.max_steps=0").train) == 1


def test_exact_match_requires_a_ground_truth_in_every_row(assets, progress, tmp_path):
    rows = [{"prompt": "1+1=", "ground_truth": "2", "response": "2"}, {"prompt": "1+2=", "response": "3"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def f(**_): return 1.0\n")
    file = f'data.train_files=["{tmp_path / "t.jsonl"}"]'
    with pytest.raises(DataError, match=r"t\.jsonl, row 2: expected a `ground_truth`"):
        _load(assets, progress, file)
    assert len(_load(assets, progress, file, f"reward.function={tmp_path / 'mine.py'}:f").train) == 2
    endpoint = ("reward.function=endpoint", "reward.url=http://127.0.0.1:30000")
    assert len(_load(assets, progress, file, *endpoint).train) == 2


def test_damaged_tokenizer_is_rejected(assets, progress, tmp_path):
    shutil.copytree(assets[0].removeprefix("model.path="), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text('{"version": 3}')
    with pytest.raises(ConfigError, match=r"model\.path: cannot load a tokenizer from "):
        _load(assets, progress, f"model.path={tmp_path / 'model'}")


def test_number_of_skipped_prompts_is_reported(assets, progress, terminal, tmp_path):
    rows = [{"prompt": "1+1=", "ground_truth": "2", "response": "2"}, {"prompt": "1" * 30, "response": "2"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f'data.train_files=["{tmp_path / "t.jsonl"}"]', "data.overlong_prompts=skip"]
    inputs = _load(assets, progress, *overrides)
    assert len(inputs.train) == 1
    assert "skipped 1 problems of" in terminal.getvalue()


def test_files_given_twice_are_warned_about(assets, progress, terminal, tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2", "response": "2"}) + "\n")
    _load(assets, progress, f'data.train_files=["{file}", "{file}"]', f'data.val_files=["{file}"]')
    shown = " ".join(terminal.getvalue().split())
    assert "data.train_files has a file more than once" in shown
    assert "the validation has problems of the training" in shown


@pytest.mark.parametrize(
    ("episode", "reward", "warns"),
    [("{}:episode", "exact_match", True), ("{}:episode", None, False), ("single_turn", "exact_match", False)],
)
@pytest.mark.parametrize("has_training", [True, False])
def test_reward_function_beside_an_own_episode_is_warned_about(
    assets, progress, terminal, tmp_path, episode, reward, warns, has_training
):
    (tmp_path / "env.py").write_text("async def episode(problem, session): return 1.0\n")
    config = load_config(DEMO_CONFIG, [*assets, f"episode.function={episode.format(tmp_path / 'env.py')}"])
    config = replace(config, reward=replace(config.reward, function=reward))
    load_inputs(config, progress, has_training=has_training)
    shown = " ".join(terminal.getvalue().split())
    assert shown.count("is ignored: episode.function=") == warns


def test_suspicious_sizes_are_warned_about(assets, progress, terminal, tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2", "response": "2"}) + "\n")
    sizes = ["trainer.total_steps=4", "actor.ppo_mini_batch_size=32", "data.train_batch_size=100"]
    _load(assets, progress, f'data.train_files=["{tmp_path / "t.jsonl"}"]', *sizes)
    assert "data.train_batch_size=100 is larger than the 1 training problems" in terminal.getvalue()
    assert "optimizer.lr_warmup_steps=20 is larger than the 16 optimizer steps" in terminal.getvalue()
    assert "actor.ppo_mini_batch_size=32 does not divide data.train_batch_size=100" in terminal.getvalue()
    assert "the last optimizer step of each epoch has 4 prompts" in terminal.getvalue()


def test_schedules_that_end_before_the_run_are_warned_about(assets, progress, terminal):
    steps = ["trainer.total_steps=10", "actor.ppo_mini_batch_size=32", "data.train_batch_size=64", "actor.ppo_epochs=3"]
    policy = ["optimizer.total_steps=47", "optimizer.min_lr_ratio=0.0", "optimizer.lr_warmup_steps=0"]
    critic = ["critic.warmup_steps=2", "critic.optimizer.lr_scheduler=cosine", "critic.optimizer.total_steps=19"]
    _load(assets, progress, *steps, *policy, "algorithm.adv_estimator=gae", *critic)
    shown = " ".join(terminal.getvalue().split())
    assert "optimizer.total_steps=47 is less than the 48 optimizer steps of the run: the learning rate is 0 in" in shown
    assert "critic.optimizer.total_steps=19 is less than the 20 optimizer steps" in shown
    terminal.truncate(0)
    enough = ["optimizer.total_steps=48", "critic.optimizer.total_steps=19", "critic.optimizer.min_lr_ratio=0.1"]
    _load(assets, progress, *steps, *policy, "algorithm.adv_estimator=gae", *critic, *enough)
    assert "optimizer steps of the run" not in terminal.getvalue()


def test_keys_without_effect_on_the_schedule_are_warned_about(assets, progress, terminal):
    keys = ["optimizer.lr_scheduler=constant", "optimizer.total_steps=1", "optimizer.min_lr_ratio=0.1"]
    critic = ["critic.optimizer.lr_scheduler=cosine", "critic.optimizer.total_steps=999"]
    _load(assets, progress, *keys, *critic, "critic.optimizer.lr_decay_steps=3", "algorithm.adv_estimator=gae")
    shown = " ".join(terminal.getvalue().split())
    assert 'with optimizer.lr_scheduler="constant": optimizer.total_steps, optimizer.min_lr_ratio' in shown
    assert 'with critic.optimizer.lr_scheduler="cosine": critic.optimizer.lr_decay_steps' in shown
    assert "the learning rate is 0" not in shown


@pytest.mark.parametrize(("warmup_steps", "warns"), [(9, False), (10, True)])
def test_policy_that_is_never_trained_is_warned_about(assets, progress, terminal, warmup_steps, warns):
    steps = ["trainer.total_steps=10", f"critic.warmup_steps={warmup_steps}", "optimizer.lr_warmup_steps=0"]
    _load(assets, progress, *steps, "algorithm.adv_estimator=gae")
    assert ("critic.warmup_steps=10 is not less than trainer.total_steps=10" in terminal.getvalue()) is warns
