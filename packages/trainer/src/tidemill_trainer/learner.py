"""The learning side of a step: log-probs, advantages and the updates of policy and critic."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import torch
from tidemill_algorithms import AdaptiveKLController, FixedKLController, kl_penalty, overlong_penalty
from tidemill_dataproto import DataProto, ragged
from tidemill_dispatch.ray import RayWorkerGroup
from tidemill_engines.location import absolute, read_json, write_text

from tidemill_trainer.algorithm import Algorithm
from tidemill_trainer.algorithm_config import AlgorithmConfig
from tidemill_trainer.checkpoints import CheckpointError
from tidemill_trainer.config import Config
from tidemill_trainer.metrics import critic_metrics, mean_metrics
from tidemill_trainer.role_groups import RoleGroups
from tidemill_trainer.roles import Role, path_of, required_roles
from tidemill_trainer.rollout.routed_experts import COLUMN as ROUTED_EXPERTS
from tidemill_trainer.sft.objective import balanced_order

_INPUTS = ("input_ids", "responses")
_SFT = (*_INPUTS, "response_mask")
_ACTOR = (*_SFT, "old_log_probs", "advantages", "loss_weights")
_CRITIC = (*_SFT, "values", "returns", "loss_weights")
_KL_STATE = "kl.json"
_HORIZON = 10_000


class Learner:
    """Train the policy and the critic on batches of episodes.

    Args:
        config: configuration of the run.
        groups: the worker groups of policy and other roles.
    """

    def __init__(self, config: Config, groups: RoleGroups) -> None:
        self._config = config
        self._groups = groups
        self._roles = required_roles(config)
        self._algorithm = Algorithm.of(config)
        self._kl = _kl_controller(config.algorithm)

    def init_reward_model(self) -> None:
        """Load the reward model, if there is one; unlike the other roles, it also scores validations of the warm-up."""
        if "reward_model" in self._roles:
            self._groups.init_roles(["reward_model"], "")

    def score(self, batch: DataProto) -> DataProto:
        """Add the column `rm_scores` float32 [B] of the reward model."""
        return batch.union(self._groups.of("reward_model").score(batch.select(["input_ids"], [])))

    def init_roles(self, initial_policy: Path, *, is_resumed: bool) -> None:
        """Load the models of the other roles, except the reward model.

        Those without a path start from the policy before the first step: `model.path`, or after a warm-up the folder
        `initial_policy`, which is written here unless the run is resumed.

        Raises:
            CheckpointError: a resumed run requires the folder, but it is missing.
        """
        roles: list[Role] = [role for role in self._roles if role != "reward_model"]
        if not roles:
            return
        path = self._config.model.path
        if self._config.warmup.max_steps > 0 and any(path_of(self._config, role) is None for role in roles):
            path = str(initial_policy.resolve())
            if not is_resumed:
                self._groups.actor.save_hf(path)
            elif not initial_policy.exists():
                raise CheckpointError(
                    f"the folder {path}, from which {' and '.join(roles)} start, is missing; restore it, or set "
                    "the path of these models"
                )
        self._groups.init_roles(roles, path)

    def infer(self, batch: DataProto) -> DataProto:
        """Add `old_log_probs` and `entropy`, the columns of other roles, and with router replay `routed_experts`.

        With `algorithm.bypass_mode`, `old_log_probs` are those of the rollout, and there is no `entropy`. If the update
        is on-policy, `update` adds both.
        """
        config = self._config
        batch.meta_info["temperature"] = config.rollout.temperature
        inputs = batch.select([*_INPUTS], [])
        inputs.meta_info["infers_policy"] = self._algorithm.infers_policy
        if config.algorithm.bypass_mode:
            batch = batch.union(DataProto.from_dict({"old_log_probs": batch["rollout_log_probs"]}))
        elif config.actor.router_replay.mode == "R3":
            # The result has the same column, in which the last token of each row has experts, too.
            inputs = inputs.union(batch.pop([ROUTED_EXPERTS]))
        return reduce(DataProto.union, self._groups.infer(inputs), batch)

    def add_advantages(self, batch: DataProto, scored: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Add `rewards` [B] and `uid` of each row's episode, and the columns of the estimator, such as `advantages`.

        Args:
            batch: rows with `episode` [B] and the columns of `infer`.
            scored: `episode`, ascending, `scores` [E] and `uid` of the episodes, and `reward_components` [E, K] or
                `baseline_rewards` [E] if the estimator reads them; with `order` [E] episode i gets the rewards of
                episode `order[i]`.

        Returns:
            The batch, and metrics of rewards and values.
        """
        owner = torch.searchsorted(scored["episode"], batch["episode"])
        rewards, metrics = self._with_overlong_penalty(batch, scored["scores"], owner)
        uid = scored.non_tensor_batch["uid"][owner.numpy()]
        rewarded = scored["order"][owner] if "order" in scored.batch else owner
        columns = {"rewards": rewards[rewarded]}
        if "reward_components" in self._algorithm.columns:
            columns["reward_components"] = scored["reward_components"][rewarded]
        if "baseline_rewards" in self._algorithm.columns:
            columns["baseline_rewards"] = scored["baseline_rewards"][owner]
        batch = batch.union(DataProto.from_dict(columns, {"uid": uid}))
        kl_coef = self._kl.kl_coef
        batch = self._algorithm.add_advantages(batch, kl_coef)
        batch, of_correction = self._algorithm.add_correction(batch)
        metrics |= of_correction
        if kl_coef > 0:
            metrics |= self._measure_kl(batch, kl_coef, num_episodes=len(batch["episode"].unique()))
        if "values" in self._algorithm.columns:
            metrics |= critic_metrics(batch)
        return batch, metrics

    def _with_overlong_penalty(
        self, batch: DataProto, rewards: torch.Tensor, owner: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the rewards [E] of the episodes, reduced by the penalty for the longest row of each, and its mean."""
        config = self._config.algorithm
        if config.overlong_buffer_len is None:
            return rewards, {}
        lengths = ragged.lengths(batch["responses"])
        longest = torch.zeros(len(rewards), dtype=lengths.dtype).scatter_reduce(0, owner, lengths, "amax")
        factor = config.overlong_penalty_factor
        penalty = overlong_penalty(
            longest,
            max_response_length=self._config.rollout.response_length,
            overlong_buffer_len=config.overlong_buffer_len,
            penalty_factor=1.0 if factor is None else factor,
        )
        return rewards + penalty, {"reward/overlong_penalty/mean": penalty[owner.unique()].mean().item()}

    def _measure_kl(self, batch: DataProto, kl_coef: float, num_episodes: int) -> dict[str, float]:
        """Adapt the coefficient of the next step; return metrics of the KL divergence from the reference per token."""
        mask = ragged.values(batch["response_mask"]).bool()
        old, reference = (ragged.values(batch[name])[mask] for name in ("old_log_probs", "ref_log_prob"))
        divergence = kl_penalty(old, reference, self._algorithm.kl_penalty).mean().item() if len(old) else 0.0
        self._kl.update(divergence, num_episodes)
        return {"actor/reward_kl_penalty": divergence, "actor/reward_kl_penalty_coeff": kl_coef}

    def update(self, batch: DataProto, step: int) -> tuple[DataProto, dict[str, float]]:
        """Make the optimizer steps of the critic, if there is one, and of the policy.

        A critic with processes of its own makes its steps at the same time as the policy.

        Returns:
            The batch, with `old_log_probs` and `entropy` also if the update is on-policy, and the metrics of the steps.
        """
        if self._algorithm.is_on_policy:
            return self._update_on_policy(batch)
        config, steps = self._config, dict[str, list[dict[str, float]]](critic=[], actor=[])
        critic_s = 0.0  # without the policy
        has_critic = "critic" in self._roles
        critic = self._critic_batches(batch, step) if has_critic else iter(())
        is_warmup = has_critic and step <= config.critic.warmup_steps
        actor = iter(()) if is_warmup else self._actor_batches(batch, step)
        is_parallel = has_critic and self._groups.of("critic") is not self._groups.actor
        one_by_one = chain(((each, None) for each in critic), ((None, each) for each in actor))
        for for_critic, for_actor in zip_longest(critic, actor) if is_parallel else one_by_one:
            calls, start = {}, time.monotonic()
            if for_critic is not None:
                calls["critic"] = self._groups.of("critic").update_critic(for_critic)
            if for_actor is not None:
                calls["actor"] = self._groups.actor.update_actor(for_actor)
            for role, call in calls.items():
                steps[role].append(call.get()[0])
            critic_s += time.monotonic() - start if for_actor is None else 0.0
        metrics = {name: value for each in steps.values() if each for name, value in mean_metrics(each).items()}
        return batch, metrics | ({"timing_s/update_critic": critic_s} if critic_s else {})

    @property
    def is_on_policy(self) -> bool:
        """Whether `update` computes `old_log_probs` instead of `infer`."""
        return self._algorithm.is_on_policy

    def _update_on_policy(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        weighted = self._algorithm.add_weights(batch)
        order = balanced_order(weighted, self._groups.actor)
        columns = [name for name in (*_ACTOR, *self._algorithm.loss_columns) if name != "old_log_probs"]
        outputs = self._groups.actor.update_on_policy(weighted.select(columns, []).reorder(order)).get()
        metrics = mean_metrics([outputs.meta_info.pop("actor_metrics")])
        return batch.union(outputs.reorder(order.argsort())), metrics

    def _critic_batches(self, batch: DataProto, step: int) -> Iterator[DataProto]:
        """Yield the batches of the critic's optimizer steps."""
        add_weights, workers = self._algorithm.add_critic_weights, self._groups.of("critic")
        return self._mini_batches(batch, step, _CRITIC, self._config.critic.ppo_epochs, add_weights, workers)

    def _actor_batches(self, batch: DataProto, step: int) -> Iterator[DataProto]:
        """Yield the batches of the policy's optimizer steps."""
        config, algorithm = self._config.actor, self._algorithm
        has_replay = config.router_replay.mode != "disabled"
        columns = (*_ACTOR, *algorithm.loss_columns, *([ROUTED_EXPERTS] if has_replay else []))
        workers = self._groups.actor
        return self._mini_batches(batch, step, columns, config.ppo_epochs, algorithm.add_weights, workers)

    def save_checkpoint(self, folder: str) -> None:
        """Save the states of policy and critic to subfolders of `folder`, and the coefficient of the KL penalty."""
        self._groups.save_checkpoint(absolute(folder))
        write_text(f"{folder}/{_KL_STATE}", json.dumps(self._kl.state_dict()))

    def finish_checkpoint(self, waits: bool) -> bool:
        """Return whether all workers have written their files of a checkpoint, after waiting for them if `waits`."""
        return self._groups.finish_checkpoint(waits=waits)

    def hash_weights(self) -> dict[str, list[str]]:
        """Return the hash of the weights of policy ("engine") and critic for each rank; see `weight_hash`."""
        return self._groups.hash_weights()

    def load_checkpoint(self, folder: str) -> None:
        """Restore what `save_checkpoint` saved, after `init_roles`.

        Raises:
            OSError: the file of the KL penalty cannot be read.
            ValueError: it is damaged.
        """
        self._groups.load_checkpoint(absolute(folder))
        if self._config.algorithm.target_kl is not None:  # else the configuration has the coefficient
            self._kl.load_state_dict(read_json(f"{folder}/{_KL_STATE}"))

    def _mini_batches(
        self,
        batch: DataProto,
        step: int,
        columns: Sequence[str],
        num_epochs: int,
        add_weights: Callable[[DataProto], DataProto],
        workers: RayWorkerGroup,
    ) -> Iterator[DataProto]:
        """Yield the batches of the optimizer steps: whole groups in a random order given by seed, step and epoch."""
        config = self._config
        num_prompts = config.actor.ppo_mini_batch_size
        size = config.data.train_batch_size if num_prompts is None else num_prompts
        problems, groups = np.unique(batch["episode"].numpy() // config.rollout.n, return_inverse=True)
        read = {*columns, "rollout_rs_kept"} & {*batch.batch.keys()}  # others, such as messages, are not copied
        batch = batch.select(sorted(read), ["uid"])
        for epoch in range(num_epochs):
            order = np.random.default_rng([config.trainer.seed, step, 2, epoch]).permutation(len(problems))
            for start in range(0, len(problems), size):
                rows = np.flatnonzero(np.isin(groups, order[start : start + size]))
                mini_batch = add_weights(batch[torch.from_numpy(rows)])
                yield _balanced(mini_batch.select([*columns], []), workers)


def _balanced(batch: DataProto, workers: RayWorkerGroup) -> DataProto:
    """Reorder the rows so that every data-parallel rank of the workers gets about the same number of tokens."""
    return batch.reorder(balanced_order(batch, workers))


def _kl_controller(config: AlgorithmConfig) -> FixedKLController | AdaptiveKLController:
    if config.target_kl is None:
        return FixedKLController(kl_coef=config.kl_coef)
    horizon = _HORIZON if config.horizon is None else config.horizon
    return AdaptiveKLController(kl_coef=config.kl_coef, target_kl=config.target_kl, horizon=horizon)
