"""The algorithm of a run, composed of functions of tidemill-algorithms or of the user."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import TypeAdapter, ValidationError
from tidemill_algorithms import ADV_ESTIMATORS, POLICY_LOSSES, ActorLoss, token_rewards, token_weights
from tidemill_algorithms.advantages import columns_of, uses_token_rewards
from tidemill_algorithms.kl import KLPenalty
from tidemill_dataproto import DataProto, ragged
from tidemill_rollout import Registry

from tidemill_trainer.algorithm_config import AlgorithmConfig
from tidemill_trainer.algorithm_options import CORRECTION, FUNCTIONS, as_function, options_of, users_of
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, describe
from tidemill_trainer.config_keys import names_of

_ARGUMENTS = {"adv_estimator": ("batch",), "policy_loss": ("log_probs", "batch")}
"""The positional arguments of the functions, by the config key that selects one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """From rewards to advantages, and the loss of the policy.

    Attributes:
        estimate: advantage estimator with its options.
        loss: loss of the policy, which requires the column `loss_weights`.
        weights: `token_weights` with its options.
        correct: `rollout_correction` with its options; None without any.
        columns: columns that the estimator reads besides `response_mask`, `rewards` and `uid`, such as `values`.
        loss_columns: columns that the loss reads besides those of every policy loss, such as `ref_log_prob`.
        kl_penalty: estimate of the KL divergence in the reward.
        is_on_policy: a batch has one optimizer step, on tokens of the same weights, so the log-probs of its own forward
            pass are `old_log_probs`, and nothing reads them earlier.
        infers_policy: `old_log_probs` are computed before the update.
    """

    estimate: Callable[[DataProto], Mapping[str, torch.Tensor]]
    loss: ActorLoss
    weights: Callable[..., torch.Tensor]
    correct: Callable[..., tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] | None
    columns: tuple[str, ...]
    loss_columns: tuple[str, ...]
    kl_penalty: KLPenalty
    is_on_policy: bool
    infers_policy: bool

    @classmethod
    def of(cls, run: Config) -> Self:
        """Load the functions of a run's configuration.

        Raises:
            ConfigError: an unknown function, an option that none of the chosen functions has, or a function of the user
                with other parameters.
        """
        config = run.algorithm
        estimator, policy_loss = (_load(key, getattr(config, key)) for key in FUNCTIONS)
        if config.kl_coef > 0 and not uses_token_rewards(estimator):
            able = ", ".join(name for name, function in ADV_ESTIMATORS.items() if uses_token_rewards(function))
            raise ConfigError(
                f'config key algorithm.kl_coef has no effect with adv_estimator="{config.adv_estimator}", which takes '
                f"one reward per episode; choose one of {able}, or use kl_loss_coef"
            )
        of_estimator, of_loss, of_correction = _options(config, [estimator, policy_loss, CORRECTION])
        if run.rollout.max_staleness > 0 and not of_correction and not config.bypass_mode:
            raise ConfigError(
                f"config key rollout.max_staleness={run.rollout.max_staleness} requires a correction for tokens of "
                "older weights, which this algorithm does not have: set algorithm.bypass_mode=true, so that the loss "
                'compares with the log-probs of the rollout, or algorithm.rollout_is="token" or "sequence"'
            )
        columns = ["ref_log_prob"] if config.kl_loss_coef > 0 else []
        if config.bypass_mode:
            columns.append("rollout_log_probs")
        elif of_correction:
            columns.append("rollout_is_weights")
        reads = {*columns_of(estimator), *columns_of(policy_loss)}
        is_read = bool(reads & {"old_log_probs", "entropy", "values"})
        is_on_policy = _has_one_step(run) and not of_correction and not is_read
        return cls(
            estimate=partial(estimator, **of_estimator),
            loss=_loss(config, policy_loss, of_loss, of_correction),
            weights=_weights(config, run.rollout.response_length),
            correct=None if config.bypass_mode else _correction(config, of_correction),
            columns=columns_of(estimator),
            kl_penalty="k1" if config.kl_penalty is None else config.kl_penalty,
            loss_columns=tuple(dict.fromkeys([*columns, *columns_of(policy_loss)])),
            is_on_policy=is_on_policy,
            infers_policy=not is_on_policy and not config.bypass_mode,
        )

    def add_advantages(self, batch: DataProto, kl_coef: float = 0.0) -> DataProto:
        """Add the columns of the estimator: `advantages` at least, ragged like `response_mask`.

        Args:
            batch: the columns that the estimator reads.
            kl_coef: coefficient of a KL penalty in the rewards of tokens, which requires `ref_log_prob`.
        """
        if kl_coef > 0:
            rewards = token_rewards(batch, kl_coef=kl_coef, kl_penalty=self.kl_penalty)
            batch = batch.union(DataProto.from_dict({"token_level_rewards": rewards}))
        return batch.union(DataProto.from_dict(dict(self.estimate(batch))))

    def add_weights(self, batch: DataProto) -> DataProto:
        """Add the ragged column `loss_weights` of the policy's loss to a whole mini-batch."""
        kept = None if self.correct is None else batch["rollout_rs_kept"]
        weights = self.weights(batch["response_mask"], uid=batch.non_tensor_batch["uid"], kept=kept)
        return batch.union(DataProto.from_dict({"loss_weights": weights}))

    def add_correction(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Add `rollout_is_weights` and `rollout_rs_kept` of the correction, if there is one, and return its metrics.

        Args:
            batch: ragged `response_mask`, `old_log_probs` and `rollout_log_probs`.
        """
        if self.correct is None:
            return batch, {}
        old, rollout = batch["old_log_probs"], batch["rollout_log_probs"]
        log_ratio = ragged.like(ragged.values(old) - ragged.values(rollout), old)
        weights, kept, metrics = self.correct(log_ratio, batch["response_mask"])
        batch = batch.union(DataProto.from_dict({"rollout_is_weights": weights, "rollout_rs_kept": kept}))
        return batch, {name: value.item() for name, value in metrics.items()}

    @staticmethod
    def add_critic_weights(batch: DataProto) -> DataProto:
        """Add the ragged column `loss_weights` of the critic's loss, a mean over tokens, to a whole mini-batch."""
        weights = token_weights(batch["response_mask"], "token-mean")
        return batch.union(DataProto.from_dict({"loss_weights": weights}))


def _has_one_step(config: Config) -> bool:
    """Return whether a batch has one optimizer step, on tokens of the weights before it, whose ratio of policies is 1.

    Not with a KL penalty in the reward, which is computed before it, nor with dropout (which the Megatron engine has
    not) or router replay, where another forward pass differs.
    """
    actor, lora = config.actor, config.model.lora
    is_one = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size in (None, config.data.train_batch_size)
    is_same = config.rollout.max_staleness == 0 and actor.router_replay.mode == "disabled"
    is_needed = config.algorithm.bypass_mode or config.algorithm.kl_coef > 0
    drops = (lora is not None and lora.dropout > 0.0) or (config.engine.backend == "fsdp2" and _has_dropout(config))
    return is_one and is_same and not is_needed and not drops


def _has_dropout(config: Config) -> bool:
    """Return whether the configuration of the model has a probability of dropout above 0."""
    file = Path(config.model.path) / "config.json"
    fields = json.loads(file.read_bytes()) if file.is_file() else {}  # without the file, the run is refused
    sections = [fields, *(value for value in fields.values() if isinstance(value, dict))]
    return any(
        isinstance(value, int | float) and value > 0
        for section in sections
        for name, value in section.items()
        if "dropout" in name or name.endswith("_pdrop")
    )


def _load(key: str, name: str) -> Callable[..., Any]:
    registry: Registry[Callable[..., Any]] = Registry(key)
    for known, function in FUNCTIONS[key].items():
        registry.register(known)(function)
    try:
        function = registry.load(name)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"config key algorithm.{key}: {error}") from error
    if name in FUNCTIONS[key]:
        return function
    _check_parameters(key, name, function)
    return as_function(function)


def _check_parameters(key: str, name: str, function: Callable[..., Any]) -> None:
    """Check a function of the user before any process starts, which would call it.

    Raises:
        ConfigError: it does not accept the arguments, or its options are invalid; the message names key and function.
    """
    where, arguments = f"config key algorithm.{key}: {name}", ", ".join(_ARGUMENTS[key])
    if inspect.isclass(function):
        raise ConfigError(f"{where} is a class, expected a function of ({arguments}); give an instance of it")
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise ConfigError(f"{where} has no signature; call it in a Python function of ({arguments})") from error
    try:
        options = options_of(function)
    except Exception as error:  # an annotation is code of the user
        raise ConfigError(
            f"{where}: the annotation of an option, a parameter after *, cannot be evaluated: {type(error).__name__}: "
            f"{error}; import its names also outside of `if TYPE_CHECKING`"
        ) from error
    try:
        signature.bind(*_ARGUMENTS[key], **options)
    except TypeError as error:
        raise ConfigError(
            f"{where} must accept the arguments ({arguments}), and its options after *, got the parameters {signature}"
        ) from error
    taken = sorted(options.keys() & {*names_of(AlgorithmConfig)})
    if taken:
        raise ConfigError(
            f"{where} has the option {taken[0]}, but algorithm.{taken[0]} is a key of the trainer, whose value is not "
            "passed to the function; rename it"
        )


def _options(config: AlgorithmConfig, functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the configured options of each function; a name that several of them have is an option of all of them."""
    types = [options_of(function) for function in functions]
    given: list[dict[str, Any]] = [{} for _ in functions]
    for name, value in config.options.items():
        owners = [number for number, of_function in enumerate(types) if name in of_function]
        if not owners:
            raise ConfigError(_unused(name, config))
        for number in owners:
            given[number][name] = _checked(name, value, types[number][name])
    for key, function, options in zip(FUNCTIONS, functions, given, strict=False):  # the correction requires none
        parameters = inspect.signature(function).parameters.values()
        required = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
        missing = [f"algorithm.{name}" for name in required if name not in options]
        if missing:
            raise ConfigError(
                f'config key {" and ".join(missing)} is required by {key}="{getattr(config, key)}"; set it in the file '
                "or on the command line"
            )
    return given


def _loss(
    config: AlgorithmConfig,
    policy_loss: Callable[..., Any],
    options: Mapping[str, Any],
    correction: Mapping[str, Any],
) -> ActorLoss:
    try:
        return ActorLoss(
            policy_loss=config.policy_loss if config.policy_loss in POLICY_LOSSES else policy_loss,
            options=options,
            entropy_coeff=config.entropy_coeff,
            kl_loss_coef=config.kl_loss_coef,
            kl_loss_type="k3+" if config.kl_loss_type is None else config.kl_loss_type,
            bypass_correction=correction if config.bypass_mode else None,
        )
    except ValueError as error:
        raise ConfigError(f"section algorithm: {error}") from error


def _correction(config: AlgorithmConfig, options: Mapping[str, Any]) -> Callable[..., Any] | None:
    if config.loss_denominator is not None and not options.keys() & {"rollout_rs", "rollout_token_veto_threshold"}:
        raise ConfigError(
            "config key algorithm.loss_denominator has no effect without rollout_rs or rollout_token_veto_threshold"
        )
    if not options:
        return None
    correct = partial(CORRECTION, **options)
    nothing = ragged.ragged(torch.zeros(0), [])
    try:
        correct(nothing, nothing)
    except ValueError as error:
        raise ConfigError(f"section algorithm: {error}") from error
    return correct


def _weights(config: AlgorithmConfig, response_length: int) -> Callable[..., torch.Tensor]:
    has_norm = config.loss_agg_mode == "seq-mean-token-sum-norm"
    if config.loss_scale_factor is not None and not has_norm:
        raise ConfigError(
            f'config key algorithm.loss_scale_factor has no effect with loss_agg_mode="{config.loss_agg_mode}"; it is '
            'used by "seq-mean-token-sum-norm"'
        )
    factor = response_length if config.loss_scale_factor is None else config.loss_scale_factor
    return partial(
        token_weights,
        mode=config.loss_agg_mode,
        loss_scale_factor=factor if has_norm else None,
        denominator="original" if config.loss_denominator is None else config.loss_denominator,
    )


def _checked(name: str, value: Any, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ConfigError(describe(f"algorithm.{name}", error.errors()[0])) from error


def _unused(name: str, config: AlgorithmConfig) -> str:
    chosen = " and ".join(f'{key}="{getattr(config, key)}"' for key in FUNCTIONS)
    users = users_of(name)
    used_by = f"it is used by {'; '.join(users)}" if users else "no function of tidemill-algorithms uses it, either"
    return f"config key algorithm.{name} is not used by {chosen}; {used_by}"
