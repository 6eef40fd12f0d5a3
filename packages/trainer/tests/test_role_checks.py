import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.demo.model import piece_tokenizer
from tidemill_trainer.role_checks import check_roles

TOPK = ["algorithm.adv_estimator=none", "algorithm.policy_loss=forward_kl_topk"]


@pytest.fixture
def model(tmp_path, tokenizer):
    """`model(pieces)`: the folder of a model with a tokenizer of these characters."""

    def make(pieces):
        folder = tmp_path / f"model{len(pieces)}"
        piece_tokenizer(pieces).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        return folder

    return make


@pytest.fixture
def check(tokenizer):
    return lambda *overrides: check_roles(load_config(DEMO_CONFIG, [*overrides]), tokenizer)


def test_model_with_the_tokenizer_of_the_policy_is_accepted(check, model):
    folder = model("0123456789+=")
    check("algorithm.adv_estimator=opd", f"teacher.path={folder}")
    check(*TOPK, "teacher.topk=15", f"teacher.path={folder}")
    check("algorithm.kl_loss_coef=0.1", f"reference.path={folder}")
    check("algorithm.adv_estimator=gae", f"critic.path={folder}")


@pytest.mark.parametrize(
    ("role", "key"),
    [("teacher", "adv_estimator=opd"), ("critic", "adv_estimator=gae"), ("reference", "kl_loss_coef=0.1")],
)
def test_other_tokenizer_is_refused_with_the_difference(check, model, role, key):
    folder = model("0123456789+=-")
    with pytest.raises(
        ConfigError,
        match=rf"{role}\.path: expected the .* 16 tokens and that of .* 15; .* '-' is id 15 in it and no token in",
    ):
        check(f"algorithm.{key}", f"{role}.path={folder}")


@pytest.fixture
def reward_model(model):
    """`reward_model({name: shape})`: override with the folder of a model with these weights."""

    def make(shapes, pieces="0123456789+="):
        folder = model(pieces)
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
        return f"reward_model.path={folder}"

    return make


def test_reward_model_with_one_label_and_the_tokenizer_of_the_policy_is_accepted(check, reward_model):
    check(reward_model({"score.weight": (1, 4)}), "reward_model.coef=0.5", "algorithm.filter_groups=acc")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"lm_head.weight": (15, 4)}, r"with one label .*, but the weights in .* have no score.weight \(architectures"),
        ({"score.weight": (3, 4)}, r"with one label .*, but score.weight in .* has the shape \[3, 4\]"),
        ({"score.weight": (4,)}, r"has the shape \[4\]; use a model with one label"),
    ],
)
def test_reward_model_without_a_head_of_one_label_is_refused(check, reward_model, shapes, message):
    with pytest.raises(ConfigError, match=rf"config key reward_model\.path: expected a sequence-cl.* {message}"):
        check(reward_model(shapes))


def test_reward_model_with_another_tokenizer_or_without_weights_is_refused(check, model, reward_model):
    with pytest.raises(ConfigError, match=r"reward_model\.path: expected the tokenizer of .* 16 tokens"):
        check(reward_model({"score.weight": (1, 4)}, "0123456789+=-"))
    with pytest.raises(ConfigError, match=r"reward_model\.path: .*safetensors"):
        check(f"reward_model.path={model('0123456789+=')}")
    with pytest.raises(ConfigError, match=r"reward_model\.path: expected a Hugging Face model in .*/nowhere"):
        check("reward_model.path=nowhere")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("algorithm.adv_estimator=remax", 'algorithm.adv_estimator="remax", which does not rate an episode by its'),
        ("algorithm.filter_groups=score", 'algorithm.filter_groups="score"'),
    ],
)
def test_setting_that_needs_the_reward_before_the_score_is_refused(check, reward_model, override, key):
    with pytest.raises(ConfigError) as refused:
        check(reward_model({"score.weight": (1, 4)}), override)
    assert key in str(refused.value)
    assert "reward_model.path" in str(refused.value)


def test_column_that_the_trainer_does_not_have_is_refused(check, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        'from tidemill_algorithms.advantages import reads\n@reads("novelty")\ndef mine(batch):\n    return {}\n'
    )
    with pytest.raises(ConfigError, match=r'mine" reads novelty, which this trainer does not provide'):
        check(f"algorithm.adv_estimator={file}:mine")


@pytest.fixture
def loss(tmp_path):
    """`loss(column)`: override that selects a policy loss which reads a column."""

    def make(column):
        file = tmp_path / f"{column}.py"
        text = (
            "from tidemill_algorithms.losses import reads\n@reads({!r})\ndef mine(log_probs, batch):\n    return {{}}\n"
        )
        file.write_text(text.format(column))
        return f"algorithm.policy_loss={file}:mine"

    return make


def test_loss_that_reads_the_column_of_a_role_requires_it(check, model, loss):
    check(loss("ref_log_prob"), f"reference.path={model('0123456789+=')}")
    check(loss("teacher_log_prob"), f"teacher.path={model('0123456789+=')}")
    check(loss("topk_ids"), f"teacher.path={model('0123456789+=')}", "teacher.topk=2", "algorithm.adv_estimator=none")
    with pytest.raises(ConfigError, match=r"teacher\.path is required"):
        check(loss("teacher_log_prob"))


@pytest.mark.parametrize("column", ["novelty", "values", "rollout_is_weights"])
def test_column_of_a_loss_that_the_update_does_not_have_is_refused(check, loss, column):
    with pytest.raises(ConfigError, match=rf'mine" reads {column}, which neither this trainer nor .*"grpo" provides'):
        check(loss(column))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.adv_estimator=opd"], r"teacher\.path is required by the estimator \"opd\" .*; set it"),
        ([*TOPK, "teacher.topk=4"], r"teacher\.path is required by .* the loss \"forward_kl_topk\"; set it"),
        ([*TOPK, "teacher.path=t"], r"teacher\.topk is required: .*\"forward_kl_topk\" read .*; set their number"),
        ([*TOPK, "teacher.path=t", "teacher.topk=16"], r"teacher\.topk must be <= 15, the size of the .*, got 16"),
        (["teacher.topk=4"], r"teacher\.topk has no effect with adv_estimator=\"grpo\" and policy_loss=\"vanilla\""),
        (
            ["algorithm.adv_estimator=opd", "teacher.path=t", "teacher.topk=4"],
            r"teacher\.topk has no effect with adv_estimator=\"opd\" and .*\"forward_kl_topk\"; remove it",
        ),
        (["critic.num_workers=2"], r"section critic has no effect"),
        (
            ["algorithm.kl_loss_coef=1", "model.lora.rank=2", "warmup.max_steps=0", "reference.num_workers=1"],
            r"reference\.num_workers has no effect: with model\.lora .*; remove it, or set reference\.path",
        ),
        (
            ["teacher.path=t"],
            r"section teacher has no effect: it is used by the estimator \"opd\" and the loss .*remove",
        ),
        (["reward_model.coef=2.0"], r"section reward_model has no effect: it is used by runs with reward_model.path"),
        (["reference.path=t"], r"section reference has no effect: it is used by a KL term"),
        (["critic.warmup_steps=2"], r"section critic has no effect: .*\"gae\" and \"vapo\""),
        (["algorithm.kl_loss_coef=1", "reference.path=nowhere"], r"reference\.path: expected a .*/nowhere, found no"),
        (
            ["algorithm.adv_estimator=remax", "algorithm.overlong_buffer_len=2"],
            r"overlong_buffer_len is not supported with adv_estimator=\"remax\"",
        ),
        (["algorithm.adv_estimator=gdpo"], r"algorithm\.reward_components: \"gdpo\" requires it"),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.reward_components=['a','b']",
                "algorithm.gdpo_reward_weights=[1]",
            ],
            r"algorithm\.gdpo_reward_weights must have one weight for each of the 2 .*reward_components, got 1",
        ),
        (["algorithm.reward_components=['acc']"], r"other estimators do not use it; got adv_estimator=\"grpo\""),
    ],
)
def test_role_that_is_missing_or_unused_is_refused(check, overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(*overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (TOPK[1:], r"adv_estimator: \"grpo\" has no effect with .*forward_kl_topk.*; set it to \"none\""),
        (["algorithm.adv_estimator=opd", *TOPK[1:]], r"adv_estimator: \"opd\" has no effect with .*forward_kl_topk"),
        (TOPK[:1], r"adv_estimator: \"none\" gives no advantages, but policy_loss=\"vanilla\" requires them; choose"),
        ([*TOPK, "algorithm.shuffle_rewards=true"], r"shuffle_rewards has no effect with adv_estimator=\"none\""),
        ([*TOPK, "algorithm.filter_groups=acc"], r"filter_groups is not supported with adv_estimator=\"none\""),
        ([*TOPK, "algorithm.overlong_buffer_len=2"], r"overlong_buffer_len is not supported with adv_est.*\"none\""),
        ([*TOPK, "reward_model.path=r"], r"reward_model\.path is not supported with algorithm\.adv_est.*\"none\""),
        ([*TOPK, "algorithm.kl_coef=0.1"], r"algorithm\.kl_coef has no effect with adv_estimator=\"none\""),
        ([*TOPK, "algorithm.clip_ratio_high=0.2"], r"algorithm\.clip_ratio_high is not used by .*forward_kl_topk"),
    ],
)
def test_setting_without_effect_on_top_k_distillation_is_refused(check, model, overrides, message):
    teacher = [f"teacher.path={model('0123456789+=')}", "teacher.topk=4"]
    with pytest.raises(ConfigError, match=message):
        check(*teacher, *overrides)


def test_model_that_its_processes_cannot_divide_is_refused(check, assets, tmp_path):
    policy, folder = Path(assets[0].removeprefix("model.path=")), tmp_path / "critic"
    shutil.copytree(policy, folder)
    config = json.loads((policy / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": config["layer_types"][:3]}
    (folder / "config.json").write_text(json.dumps(config))
    parallel = ["engine.backend=megatron", "engine.pp=2", "actor.num_workers=2", "critic.num_workers=2"]
    overrides = [*assets, "algorithm.adv_estimator=gae", f"critic.path={folder}", *parallel]
    with pytest.raises(ConfigError, match=r"config key critic\.num_workers: .*must divide the 3 layers"):
        check(*overrides)
