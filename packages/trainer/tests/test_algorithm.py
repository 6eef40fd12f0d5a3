import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from tidemill_algorithms import ADV_ESTIMATORS, POLICY_LOSSES
from tidemill_dataproto import DataProto, ragged
from tidemill_trainer.algorithm import Algorithm
from tidemill_trainer.algorithm_config import AlgorithmConfig, CriticConfig
from tidemill_trainer.algorithm_options import option_names
from tidemill_trainer.config_file import ConfigError, load_config, save_config


@pytest.fixture
def algorithm(config_file):
    """The algorithm of `key=value` overrides."""

    def make(*overrides):
        return Algorithm.of(load_config(config_file, [f"algorithm.{override}" for override in overrides]))

    return make


@pytest.fixture
def batch():
    mask = ragged.ragged(torch.ones(6), [2, 3, 1])
    columns = {"response_mask": mask, "rewards": torch.tensor([1.0, 0.0, 1.0])}
    return DataProto.from_dict(columns, {"uid": ["a", "a", "b"]})


def test_options_reach_the_function_that_has_them(algorithm, batch):
    made = algorithm("norm_adv_by_std_in_grpo=false", "clip_ratio_high=0.28")
    assert ragged.values(made.add_advantages(batch)["advantages"]).tolist() == [0.5, 0.5, -0.5, -0.5, -0.5, 0.0]
    assert made.loss.options == {"clip_ratio_high": 0.28}


def test_weights_have_the_configured_aggregation(algorithm, batch):
    weighted = algorithm("loss_agg_mode=prompt-mean").add_weights(batch)
    assert ragged.values(weighted["loss_weights"]).tolist() == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.5])


def test_correction_weighs_and_rejects_tokens(algorithm, batch):
    mask = batch["response_mask"]
    ratios = torch.tensor([1.0, 4.0, 1.1, 0.9, 1.0, 0.25])
    columns = {"old_log_probs": ratios.log(), "rollout_log_probs": torch.zeros(6)}
    batch = batch.union(DataProto.from_dict({name: ragged.like(values, mask) for name, values in columns.items()}))
    rejection = ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=3.0", "loss_denominator=kept"]
    made = algorithm("rollout_is=token", "rollout_is_threshold=2.0", *rejection)
    corrected, metrics = made.add_correction(batch)
    assert ragged.values(corrected["rollout_is_weights"]).tolist() == pytest.approx([1, 2, 1.1, 0.9, 1, 0.25])
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)
    weights = ragged.values(made.add_weights(corrected)["loss_weights"])
    assert weights.tolist() == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.2, 0.0])
    assert made.loss_columns == ("rollout_is_weights",)


@pytest.mark.parametrize(
    ("fields", "is_on_policy"),
    [
        ({"attention_dropout": 0.0}, True),
        ({"resid_pdrop": 0.1}, False),
        ({"text_config": {"attention_dropout": 0.1}}, False),
    ],
)
def test_dropout_of_the_model_requires_log_probs_of_a_pass_without_it(config_file, tmp_path, fields, is_on_policy):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert Algorithm.of(load_config(config_file, [f"model.path={tmp_path}"])).is_on_policy is is_on_policy


def test_tokens_of_older_weights_require_a_correction(config_file):
    def make(*overrides):
        return Algorithm.of(load_config(config_file, ["rollout.max_staleness=1", *overrides]))

    with pytest.raises(ConfigError, match=r"max_staleness=1 requires a correction .* algorithm\.bypass_mode=true"):
        make()
    assert make("algorithm.bypass_mode=true").loss_columns == ("rollout_log_probs",)
    assert make("algorithm.rollout_is=token").loss_columns == ("rollout_is_weights",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adv_estimator=grop"], r"config key algorithm\.adv_estimator: expected a registered adv_estimator \(.*grpo"),
        (["policy_loss=vanila"], r"config key algorithm\.policy_loss: expected .*vanilla.*, got 'vanila'"),
        (["policy_loss=none.py:loss"], r"algorithm\.policy_loss: the file .*none\.py does not exist"),
        (
            ["adv_estimator=rloo", "norm_adv_by_std_in_grpo=true"],
            r'algorithm\.norm_adv_by_std_in_grpo is not used by adv_estimator="rloo" and policy_loss="vanilla"; it is '
            'used by adv_estimator "grpo"',
        ),
        (["clip_ratio_low=-0.2"], r"config key algorithm\.clip_ratio_low must be >= 0, got -0\.2"),
        (["adv_estimator=vapo", "lam_alpha=-1.0"], r"algorithm\.lam_alpha must be > 0, got -1\.0"),
        (["adv_estimator=vapo", "lam_critic=2.0"], r"algorithm\.lam_critic must be <= 1, got 2\.0"),
        (["policy_loss=sapo", "tau_pos=-1.0"], r"algorithm\.tau_pos must be > 0, got -1\.0"),
        (["policy_loss=sapo", "tau_neg=inf"], r"algorithm\.tau_neg must be a finite number, got inf"),
        (["policy_loss=dppo_tv", "ratio_cap=0.5"], r"algorithm\.ratio_cap must be > 1, got 0\.5"),
        (["policy_loss=dppo_tv", "divergence_low=-1.0"], r"algorithm\.divergence_low must be >= 0, got -1\.0"),
        (["policy_loss=dppo_tv", "divergence_high=-1.0"], r"algorithm\.divergence_high must be >= 0, got -1\.0"),
        (["policy_loss=geo_mean", "clip_ratio_low=1.0"], r"algorithm\.clip_ratio_low must be < 1, got 1\.0"),
        (["rollout_is=token", "rollout_is_threshold=nan"], r"rollout_is_threshold must be > 0, got nan"),
        (["clip_ratio_high=wide"], r"config key algorithm\.clip_ratio_high must be a valid number, got 'wide'"),
        (["norm_adv_by_std_in_grpo=1"], r"algorithm\.norm_adv_by_std_in_grpo must be a valid boolean, got 1"),
        (["rollout_is_threshold=2.0"], r"section algorithm: rollout_is_threshold=2.0 has no effect without rollout_is"),
        (["rollout_is=token", "bypass_mode=true"], r"section algorithm: vanilla has the ratio of the policies already"),
        (["rollout_is=token", "loss_denominator=kept"], r"loss_denominator has no effect without rollout_rs"),
        (["loss_denominator=kept"], r"algorithm\.loss_denominator has no effect without rollout_rs"),
        (["kl_coef=0.1"], r'algorithm\.kl_coef has no effect with adv_estimator="grpo"'),
        (["loss_scale_factor=8"], r'algorithm\.loss_scale_factor has no effect with loss_agg_mode="token-mean"'),
    ],
)
def test_invalid_algorithm_is_refused_with_the_remedy(algorithm, overrides, message):
    with pytest.raises(ConfigError, match=message):
        algorithm(*overrides)


def test_bound_of_cispo_that_is_no_bound_is_accepted(algorithm):
    assert algorithm("policy_loss=cispo", "clip_ratio_low=1.0").loss.options == {"clip_ratio_low": 1.0}


@pytest.mark.parametrize("name", sorted({*ADV_ESTIMATORS} - {"none"}))
def test_estimators_without_advantages_for_one_response_are_those_that_require_several(batch, name):
    mask = batch["response_mask"]
    tokens = {each: ragged.like(torch.rand(6), mask) for each in ("values", "teacher_log_prob", "old_log_probs")}
    rows = {"reward_components": torch.rand(3, 2), "baseline_rewards": torch.rand(3)}
    alone = DataProto.from_dict(
        {**tokens, **rows, "response_mask": mask, "rewards": batch["rewards"]}, {"uid": [*"abc"]}
    )
    has_none = not ragged.values(ADV_ESTIMATORS[name](alone)["advantages"]).any()
    assert has_none == (AlgorithmConfig(adv_estimator=name).compares_responses is not None)


_USER_CODE = """
def double(batch, *, scale: float = 2.0):
    return {"advantages": batch["response_mask"] * scale}
"""


def test_function_of_the_user_has_its_own_options(config_file, algorithm, batch):
    file = config_file.parent / "mine.py"
    file.write_text(_USER_CODE)
    made = algorithm(f"adv_estimator={file}:double", "scale=3.0")
    assert ragged.values(made.add_advantages(batch)["advantages"]).tolist() == [3.0] * 6
    with pytest.raises(ConfigError, match=r"algorithm\.scal is not used by .*; no function of tidemill-algorithms"):
        algorithm(f"adv_estimator={file}:double", "scal=3.0")


_BOUNDED = """
from typing import Annotated
from pydantic import Field
def mine(batch, *, gamma: Annotated[float, Field(le=5)], lam: str): ...
"""


def test_options_of_the_user_have_the_types_of_their_own_annotations(config_file, algorithm):
    file = config_file.parent / "mine.py"
    file.write_text(_BOUNDED)
    assert algorithm(f"adv_estimator={file}:mine", "gamma=4.0", "lam=long").estimate.keywords["lam"] == "long"
    with pytest.raises(ConfigError, match=r"algorithm\.gamma must be <= 5, got 6"):
        algorithm(f"adv_estimator={file}:mine", "gamma=6.0")
    with pytest.raises(ConfigError, match=r"algorithm\.gamma must be <= 1, got 4"):
        algorithm("adv_estimator=gae", "gamma=4.0")


_TYPE_CHECKED = """
from __future__ import annotations
from functools import partial
from typing import TYPE_CHECKING, Annotated
from pydantic import Field
from tidemill_algorithms.advantages import gae, reads
from tidemill_algorithms.losses import vanilla
if TYPE_CHECKING:
    from tidemill_dataproto import DataProto

def double(batch: DataProto, *, scale: Annotated[float, Field(le=5)] = 2.0) -> dict:
    return {"advantages": batch["response_mask"] * scale}

class Scaled:
    __slots__ = ()

    @reads("values")
    def __call__(self, batch: DataProto, *, scale: Annotated[float, Field(le=5)] = 2.0) -> dict:
        return double(batch, scale=scale)

scaled, triple = Scaled(), partial(double, scale=3.0)
method = scaled.__call__
with_lam, with_clip = partial(gae, lam=0.9), partial(vanilla, clip_ratio_low=0.1)

def unknown(batch, *, like: DataProto | None = None): ...
"""


@pytest.fixture
def own(tmp_path):
    """`own(code)`: path of a file with code of the user."""

    def write(code):
        (tmp_path / "mine.py").write_text(code)
        return tmp_path / "mine.py"

    return write


@pytest.mark.parametrize(("name", "default"), [("double", 2.0), ("scaled", 2.0), ("method", 2.0), ("triple", 3.0)])
def test_own_function_partial_or_object_may_have_annotations_for_type_checkers(algorithm, own, batch, name, default):
    estimator = f"adv_estimator={own(_TYPE_CHECKED)}:{name}"
    for scale, overrides in ((default, []), (4.0, ["scale=4.0"])):
        advantages = algorithm(estimator, *overrides).add_advantages(batch)["advantages"]
        assert ragged.values(advantages).tolist() == [scale] * 6
    with pytest.raises(ConfigError, match=r"algorithm\.scale must be <= 5, got 6"):
        algorithm(estimator, "scale=6.0")


def test_partials_and_objects_have_the_columns_and_ranges_of_their_functions(algorithm, own):
    file = own(_TYPE_CHECKED)
    assert algorithm(f"adv_estimator={file}:scaled").columns == ("values",)
    assert algorithm(f"adv_estimator={file}:with_lam", "gamma=0.5").columns == algorithm("adv_estimator=gae").columns
    assert algorithm(f"adv_estimator={file}:with_lam", "kl_coef=0.1").estimate.func.__wrapped__.keywords == {"lam": 0.9}
    assert algorithm(f"policy_loss={file}:with_clip", "clip_ratio_c=4.0").loss.options == {"clip_ratio_c": 4.0}
    with pytest.raises(ConfigError, match=r"algorithm\.gamma must be <= 1, got 4"):
        algorithm(f"adv_estimator={file}:with_lam", "gamma=4.0")


def test_option_whose_annotation_cannot_be_evaluated_is_refused(algorithm, own):
    message = r"adv_estimator: .*mine\.py:unknown: the annotation of an option, .* NameError: name 'DataProto'"
    with pytest.raises(ConfigError, match=message):
        algorithm(f"adv_estimator={own(_TYPE_CHECKED)}:unknown")


_OTHER_PARAMETERS = """
def extra(batch, foo): ...
def nothing(): ...
def needs(batch, *, need: float, rate: float): ...
def taken(log_probs, batch, *, entropy_coeff: float = 0.0): ...
def optional(batch, foo=None): ...
class Kind:
    def __init__(self, batch): ...
"""


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("adv_estimator", "extra", r": .*mine\.py:extra must accept the arguments \(batch\), .* \(batch, foo\)$"),
        ("policy_loss", "needs", r": .*mine\.py:needs must accept the arguments \(log_probs, batch\), .*need: float"),
        ("policy_loss", "nothing", r": .*:nothing must accept the arguments \(log_probs, batch\), .* \(\)$"),
        ("adv_estimator", "Kind", r": .*:Kind is a class, expected a function of \(batch\); give an instance"),
        ("policy_loss", "taken", r": .*:taken has the option entropy_coeff, .* not passed to the function; rename it"),
    ],
)
def test_own_function_with_other_parameters_is_refused(algorithm, own, key, name, message):
    with pytest.raises(ConfigError, match=rf"config key algorithm\.{key}{message}"):
        algorithm(f"{key}={own(_OTHER_PARAMETERS)}:{name}", "entropy_coeff=0.1")


def test_option_without_default_is_required(algorithm, own):
    estimator = f"adv_estimator={own(_OTHER_PARAMETERS)}:needs"
    with pytest.raises(ConfigError, match=r'algorithm\.need is required by adv_estimator=".*mine\.py:needs"; set it'):
        algorithm(estimator, "rate=1.0")
    assert algorithm(estimator, "rate=1.0", "need=2.0").estimate.keywords == {"rate": 1.0, "need": 2.0}
    algorithm(f"adv_estimator={own(_OTHER_PARAMETERS)}:optional")


ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "packages/algorithms/examples"


def test_example_of_an_own_advantage_divides_by_the_mean_of_the_group(algorithm, batch):
    made = algorithm(f"adv_estimator={EXAMPLES}/my_advantage.py:max_rl", "eps=0.25")
    advantages = ragged.values(made.add_advantages(batch)["advantages"]).tolist()
    assert advantages == pytest.approx([2 / 3] * 2 + [-2 / 3] * 3 + [0.0])  # (1 - 0.5) / (0.5 + 0.25)


def test_example_of_an_own_loss_bounds_the_ratio_of_bad_responses(algorithm, batch):
    loss = algorithm(f"policy_loss={EXAMPLES}/my_loss.py:topr", "max_ratio=0.9").loss
    mask = batch["response_mask"]
    advantages, old = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0]), torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    columns = {"advantages": advantages, "old_log_probs": old.log()}
    sampled = batch.union(DataProto.from_dict({name: ragged.like(column, mask) for name, column in columns.items()}))
    log_probs = torch.tensor([0.75, 0.75, 0.25, 0.5, 0.75, 0.75]).log().requires_grad_()
    terms, metrics = loss.policy_loss(log_probs, sampled, **loss.options)
    (gradient,) = torch.autograd.grad(terms.sum(), log_probs)
    assert gradient.tolist() == pytest.approx([-1.0, -1.0, 0.75, 0.75, 0.75, 0.9])  # 0.5 * 1 * 1.5; min(1.5, 0.9)
    assert metrics["actor/pg_clipfrac"].tolist() == [False] * 5 + [True]


def test_saved_options_are_keys_of_the_section(config_file, tmp_path):
    config = load_config(config_file, ["algorithm.clip_ratio_high=0.28"])
    save_config(config, tmp_path / "saved.toml")
    assert "[algorithm.options]" not in (tmp_path / "saved.toml").read_text()
    assert load_config(tmp_path / "saved.toml") == config


def test_all_functions_of_the_package_can_be_chosen(algorithm):
    for estimator in ADV_ESTIMATORS:
        algorithm(f"adv_estimator={estimator}")
    for loss in POLICY_LOSSES:
        algorithm(f"policy_loss={loss}")


def test_compatibility_page_names_keys_that_exist():
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs/algorithms.md").read_text(), flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z]\w+)(?: = [^`]*)?`", row.split("|")[-2])}
    keys = {field.name for config in (AlgorithmConfig, CriticConfig) for field in fields(config)} | {*option_names()}
    assert named - keys <= {*ADV_ESTIMATORS}
    assert len(named & keys) > 30
