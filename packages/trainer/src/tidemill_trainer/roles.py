"""The models of a run by role, each an engine in training processes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from tidemill_engines import BaseEngine, EngineRegistry
from tidemill_engines.config import CheckpointConfig, ModelConfig, OptimizerConfig

from tidemill_trainer.algorithm import Algorithm
from tidemill_trainer.algorithm_config import CriticConfig, ReferenceConfig, RewardModelConfig, TeacherConfig
from tidemill_trainer.config import Config
from tidemill_trainer.run_config import RunConfig

Role = Literal["reference", "critic", "teacher", "reward_model"]
"""The roles besides the policy."""

TEACHER_TOPK = frozenset({"topk_ids", "teacher_topk_log_probs"})
"""The columns that the teacher computes with `teacher.topk`."""

COLUMNS: Mapping[Role, frozenset[str]] = {
    "reference": frozenset({"ref_log_prob"}),
    "critic": frozenset({"values"}),
    "teacher": TEACHER_TOPK | {"teacher_log_prob"},
    "reward_model": frozenset({"rm_scores"}),
}
"""The columns that each role computes."""


def build_policy(config: RunConfig) -> BaseEngine:
    """Create the engine of the policy; its `initialize()` loads the model."""
    return EngineRegistry.new(
        model_type="language_model",
        backend=config.engine.backend,
        model=config.model,
        engine=config.policy_engine(),
        optimizer=config.optimizer,
        checkpoint=CheckpointConfig(asynchronous=config.trainer.async_save),
    )


def build_role(config: Config, role: Role, initial_policy: str) -> BaseEngine:
    """Create the engine of another role.

    Args:
        config: configuration of the run.
        role: role of the model.
        initial_policy: folder of the model from which reinforcement learning starts.
    """
    return EngineRegistry.new(
        model_type="value_model" if role in ("critic", "reward_model") else "language_model",
        backend=config.engine.backend,
        model=model_of(config, role, initial_policy),
        engine=replace(config.engine, param_offload=_section(config, role).param_offload),
        optimizer=optimizer_of(config, role),
        checkpoint=CheckpointConfig(asynchronous=config.trainer.async_save),
    )


def model_of(config: Config, role: Role, initial_policy: str) -> ModelConfig:
    """Return the model of a role; arguments as for `build_role`."""
    own = path_of(config, role)
    path = initial_policy if own is None else own
    seed = config.model.init_seed if path == config.model.path else None
    return replace(config.model, path=path, init_seed=seed, lora=None, frozen=(), router_aux_loss_coef=0.0)


def optimizer_of(config: Config, role: Role) -> OptimizerConfig | None:
    """Return the optimizer of a role; None: it is not trained."""
    return config.critic.optimizer if role == "critic" else None


def path_of(config: Config, role: Role) -> str | None:
    """Return the configured folder of a role's model; None: the initial policy."""
    return _section(config, role).path


def _section(config: Config, role: Role) -> ReferenceConfig | CriticConfig | TeacherConfig | RewardModelConfig:
    return {
        "reference": config.reference,
        "critic": config.critic,
        "teacher": config.teacher,
        "reward_model": config.reward_model,
    }[role]


def required_roles(config: Config) -> list[Role]:
    """Return the roles that the algorithm requires and that have an engine of their own."""
    return [role for role in needed_roles(config) if role != "reference" or not has_adapter_reference(config)]


def own_workers(config: Config) -> dict[Role, int]:
    """Return the number of processes of each role that has its own."""
    own: dict[Role, int] = {}
    for role in required_roles(config):
        if (number := _section(config, role).num_workers) is not None:
            own[role] = number
    return own


def needed_roles(config: Config) -> list[Role]:
    """Return the roles whose columns the estimator, the loss or the reward reads."""
    algorithm = Algorithm.of(config)
    read = {*algorithm.columns, *algorithm.loss_columns}
    read |= {"ref_log_prob"} if config.algorithm.kl_coef > 0 else set()
    read |= {"rm_scores"} if config.reward_model.path is not None else set()
    return [role for role, columns in COLUMNS.items() if not columns.isdisjoint(read)]


def has_adapter_reference(config: Config) -> bool:
    """Return whether the reference is the policy without its adapter, which requires no engine of its own."""
    is_initial = config.reference.path is None and config.warmup.max_steps == 0
    return config.model.lora is not None and is_initial and "reference" in needed_roles(config)
