"""Checks of the models besides the policy, before any process starts."""

import json
from collections.abc import Mapping
from pathlib import Path

from tidemill_algorithms import ADV_ESTIMATORS, POLICY_LOSSES
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tidemill_trainer.algorithm import Algorithm
from tidemill_trainer.algorithm_config import (
    AlgorithmConfig,
    CriticConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.rewards import has_own_reward
from tidemill_trainer.roles import (
    COLUMNS,
    TEACHER_TOPK,
    Role,
    has_adapter_reference,
    model_of,
    needed_roles,
    optimizer_of,
)

_PROVIDED = {"values", "old_log_probs", "reward_components", "baseline_rewards"} | COLUMNS["teacher"]
_OF_UPDATE = {"ref_log_prob", "old_log_probs", "rollout_log_probs", "advantages", "rewards"} | COLUMNS["teacher"]
_WITHOUT_ADVANTAGES = "forward_kl_topk"
_USES = {
    "reference": "a KL term (algorithm.kl_loss_coef or algorithm.kl_coef above 0)",
    "critic": 'the estimators "gae" and "vapo"',
    "teacher": 'the estimator "opd" and the loss "forward_kl_topk"',
    "reward_model": "runs with reward_model.path",
}
_Section = ReferenceConfig | CriticConfig | TeacherConfig | RewardModelConfig


def check_roles(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the models that the algorithm requires are given, exist, and have the tokenizer of the policy.

    Raises:
        ConfigError: a check failed, or a section has no effect; the message names the keys.
    """
    algorithm = config.algorithm
    columns = set(Algorithm.of(config).columns)
    missing = sorted(columns - _PROVIDED)
    if missing:
        raise ConfigError(
            f'config key algorithm.adv_estimator: "{algorithm.adv_estimator}" reads {", ".join(missing)}, which this '
            f"trainer does not provide; choose another one"
        )
    if ("reward_components" in columns) != bool(algorithm.reward_components):
        raise ConfigError(
            'config key algorithm.reward_components: "gdpo" requires it, and other estimators do not use it; got '
            f'adv_estimator="{algorithm.adv_estimator}" and {list(algorithm.reward_components)}'
        )
    weights, number = algorithm.options.get("gdpo_reward_weights"), len(algorithm.reward_components)
    if algorithm.adv_estimator == "gdpo" and weights is not None and len(weights) != number:
        raise ConfigError(
            f"config key algorithm.gdpo_reward_weights must have one weight for each of the {number} "
            f"algorithm.reward_components, got {len(weights)}"
        )
    _check_advantages(algorithm)
    by_reward = columns.isdisjoint({"reward_components", "baseline_rewards", "teacher_log_prob"})
    by_reward &= algorithm.adv_estimator != "none"
    for key in ("overlong_buffer_len", "filter_groups"):
        if getattr(algorithm, key) is not None and not by_reward:
            raise ConfigError(
                f'config key algorithm.{key} is not supported with adv_estimator="{algorithm.adv_estimator}", which '
                "does not rate an episode by its reward alone; remove it"
            )
    _check_reward_model(config, by_reward=by_reward)
    _check_loss(config, columns)
    _check_topk(config, len(tokenizer))
    required = needed_roles(config)
    sections: Mapping[Role, _Section] = {
        "reference": config.reference,
        "critic": config.critic,
        "teacher": config.teacher,
        "reward_model": config.reward_model,
    }
    for role, section in sections.items():
        if role not in required:
            if section != type(section)():
                raise ConfigError(f"section {role} has no effect: it is used by {_USES[role]}; remove it")
            continue
        if section.path is not None:
            _check_model(f"{role}.path", Path(section.path), tokenizer)
        elif role == "teacher":
            raise ConfigError(f"config key teacher.path is required by {_USES[role]}; set it")
        if section.num_workers is not None:
            _check_own_workers(config, role, section.num_workers)


def _check_advantages(algorithm: AlgorithmConfig) -> None:
    """Check that advantages are computed exactly if the loss uses them; a loss of the user may use none."""
    has_none, is_without = algorithm.adv_estimator == "none", algorithm.policy_loss == _WITHOUT_ADVANTAGES
    if is_without and not has_none:
        raise ConfigError(
            f'config key algorithm.adv_estimator: "{algorithm.adv_estimator}" has no effect with '
            f'policy_loss="{_WITHOUT_ADVANTAGES}", which uses no advantages; set it to "none"'
        )
    if has_none and not is_without and algorithm.policy_loss in POLICY_LOSSES:
        raise ConfigError(
            'config key algorithm.adv_estimator: "none" gives no advantages, but '
            f'policy_loss="{algorithm.policy_loss}" requires them; choose another estimator, or '
            f'policy_loss="{_WITHOUT_ADVANTAGES}"'
        )
    is_distilled = algorithm.adv_estimator == "opd" and not algorithm.options.get("opd_task_coef")
    if algorithm.shuffle_rewards and (has_none or is_distilled):
        raise ConfigError(
            f'config key algorithm.shuffle_rewards has no effect with adv_estimator="{algorithm.adv_estimator}"'
            f"{' without opd_task_coef' if is_distilled else ''}, which does not use rewards; remove it"
        )


def _check_topk(config: Config, vocab_size: int) -> None:
    """Check that `teacher.topk` is set exactly if something reads the most probable tokens, and is in range."""
    algorithm, topk = Algorithm.of(config), config.teacher.topk
    is_read = not TEACHER_TOPK.isdisjoint({*algorithm.columns, *algorithm.loss_columns})
    chosen = f'adv_estimator="{config.algorithm.adv_estimator}" and policy_loss="{config.algorithm.policy_loss}"'
    if is_read and topk is None:
        raise ConfigError(
            f"config key teacher.topk is required: {chosen} read the teacher's most probable tokens; set their number, "
            "such as 32"
        )
    if topk is not None and not is_read:
        raise ConfigError(
            f'config key teacher.topk has no effect with {chosen}; it is used by the loss "{_WITHOUT_ADVANTAGES}"; '
            "remove it"
        )
    if topk is not None and topk > vocab_size:
        raise ConfigError(f"config key teacher.topk must be <= {vocab_size}, the size of the vocabulary, got {topk}")


def _check_own_workers(config: Config, role: Role, num_workers: int) -> None:
    """Check that a role has a model of its own, which can be divided among its processes."""
    if role == "reference" and has_adapter_reference(config):
        raise ConfigError(
            "config key reference.num_workers has no effect: with model.lora and without reference.path, the reference "
            "is the policy without its adapter; remove it, or set reference.path"
        )
    try:
        config.engine.check(model_of(config, role, config.model.path), optimizer_of(config, role), num_workers)
    except ValueError as error:
        raise ConfigError(f"config key {role}.num_workers: {error}") from error


def _check_reward_model(config: Config, *, by_reward: bool) -> None:
    """Check that the weights have a head with one output, and that the score is part of what is trained on."""
    algorithm, section = config.algorithm, config.reward_model
    if section.path is None:
        return
    if not by_reward:
        raise ConfigError(
            f'config key reward_model.path is not supported with algorithm.adv_estimator="{algorithm.adv_estimator}", '
            "which does not rate an episode by its reward alone; remove it"
        )
    if algorithm.filter_groups == "score" or (algorithm.filter_groups == "acc" and not has_own_reward(config)):
        raise ConfigError(
            f'config key algorithm.filter_groups="{algorithm.filter_groups}" is not supported with reward_model.path: '
            'groups are filtered before the reward model scores them; use "acc" with a reward.function, or remove it'
        )
    path = Path(section.path)
    if not (path / "config.json").is_file():
        return  # reported with those of the other models
    expected = "expected a sequence-classification model with one label (score.weight with the shape [1, hidden size])"
    try:
        with SafetensorsFiles(path) as files:
            shape = files.shapes.get("score.weight")
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"config key reward_model.path: {error}") from error
    if shape is None:
        names = json.loads((path / "config.json").read_text()).get("architectures")
        raise ConfigError(
            f"config key reward_model.path: {expected}, but the weights in {path} have no score.weight (architectures "
            f"in config.json: {names}); use a model that was trained to score"
        )
    if len(shape) != 2 or shape[0] != 1:
        raise ConfigError(
            f"config key reward_model.path: {expected}, but score.weight in {path} has the shape {[*shape]}; use a "
            "model with one label"
        )


def _check_loss(config: Config, of_estimator: set[str]) -> None:
    """Check that the update has the columns that the loss declares; an own estimator may return any column."""
    algorithm, functions = config.algorithm, Algorithm.of(config)
    known = _OF_UPDATE | ({"values", "returns"} if "values" in of_estimator else set())
    known |= set() if algorithm.bypass_mode else {"entropy"}
    known |= set() if functions.correct is None else {"rollout_is_weights"}
    missing = sorted({*functions.loss_columns} - known)
    if missing and (algorithm.adv_estimator in ADV_ESTIMATORS or "values" in missing):
        raise ConfigError(
            f'config key algorithm.policy_loss: "{algorithm.policy_loss}" reads {", ".join(missing)}, which neither '
            f'this trainer nor adv_estimator="{algorithm.adv_estimator}" provides; choose another one'
        )


def _check_model(key: str, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"config key {key}: expected a Hugging Face model in {path.absolute()}, found no config.json; check it"
        )
    try:
        own = AutoTokenizer.from_pretrained(path).get_vocab()
    except Exception as error:  # tokenizers raises a plain Exception for a damaged file
        raise ConfigError(f"config key {key}: cannot load a tokenizer from {path}: {error}") from error
    expected = tokenizer.get_vocab()
    if own == expected:
        return
    token = min(token for token in own.keys() | expected.keys() if own.get(token) != expected.get(token))
    ids = ["no token" if vocab.get(token) is None else f"id {vocab[token]}" for vocab in (own, expected)]
    raise ConfigError(
        f"config key {key}: expected the tokenizer of model.path, because the same token ids are given to both models; "
        f"it has {len(own)} tokens and that of model.path {len(expected)}; for example, {token!r} is {ids[0]} in it "
        f"and {ids[1]} in model.path"
    )
