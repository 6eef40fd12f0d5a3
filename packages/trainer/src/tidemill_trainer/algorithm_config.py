"""The configuration of the algorithm and of the models that it requires besides the policy."""

from dataclasses import field
from typing import Any, Literal

from pydantic import FiniteFloat
from pydantic.dataclasses import dataclass
from tidemill_algorithms.kl import KLPenalty
from tidemill_engines.config import OptimizerConfig

from tidemill_trainer.config_types import Count, CountOrZero, NotNegative, Positive

_REQUIRED = {
    "kl_loss_type": "kl_loss_coef",
    "kl_penalty": "kl_coef",
    "target_kl": "kl_coef",
    "horizon": "target_kl",
    "max_num_gen_batches": "filter_groups",
    "overlong_penalty_factor": "overlong_buffer_len",
}
_COMPARING = frozenset({"gdpo", "grpo", "opo", "reinforce_plus_plus_baseline", "rloo"})
"""Estimators whose advantages are 0 for the only response to a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """From rewards to the loss of the policy.

    Attributes:
        adv_estimator: advantage estimator of tidemill-algorithms ("grpo", "rloo", ...), "pkg.mod:attr" or
            "path/file.py:attr". "none" is for the loss "forward_kl_topk", which uses no advantages, and for own losses.
        policy_loss: policy loss of tidemill-algorithms ("vanilla", "gspo", ...), "pkg.mod:attr" or "path/file.py:attr".
        loss_agg_mode: from the terms of tokens to the loss. "token-mean": mean over all tokens of the mini-batch;
            "seq-mean-token-sum" and "seq-mean-token-mean": mean over rows of the sum or mean over their tokens;
            "seq-mean-token-sum-norm": sum over all tokens, divided by the number of rows and `loss_scale_factor`;
            "prompt-mean": mean over prompts of the mean over their tokens.
        loss_scale_factor: constant of "seq-mean-token-sum-norm"; None: `rollout.response_length`.
        entropy_coeff: weight of the entropy bonus.
        kl_loss_coef: weight of the KL divergence from the reference in the loss; 0 requires no reference.
        kl_loss_type: estimate of this KL divergence: "k1" ("kl"), "abs", "k2" ("mse"), "k3" ("low_var_kl"); a "+" after
            the name takes the gradient of "k2". None: "k3+".
        kl_coef: weight of the KL divergence from the reference in the reward of each token, for estimators with rewards
            of tokens (gae, reinforce_plus_plus, ...).
        kl_penalty: estimate of this KL divergence, named as above. None: "k1".
        target_kl: adapt `kl_coef` to reach this KL divergence per token; None keeps it.
        horizon: number of episodes in which a KL divergence of 1.2 times `target_kl` or more raises `kl_coef` by 20 %.
            None: 10,000.
        bypass_mode: use the log-probs of the rollout as `old_log_probs` instead of computing them, so that the ratio of
            the loss also has the difference between engine and training.
        loss_denominator: which tokens the denominators of `loss_agg_mode` count, where a rollout correction rejects
            tokens: all ("original") or those that remain ("kept"). None: "original".
        filter_groups: dynamic sampling: drop groups in which all episodes have the same "acc" (accuracy) or "score"
            (reward), and generate further groups until the batch is complete. None: train on all groups.
        max_num_gen_batches: rounds of generation after which the run stops if the batch is not complete. None: 10.
        overlong_buffer_len: number of tokens before `rollout.response_length` over which the reward of an episode falls
            by `overlong_penalty_factor`. None: no penalty for length.
        overlong_penalty_factor: largest reduction. None: 1.
        reward_components: metrics of an episode's outcome that are the rewards of "gdpo", such as ["acc", "format"].
        shuffle_rewards: negative control: shuffle the rewards within the batch, so that the model cannot learn.
        options: in a file, further keys of the section: keyword arguments of the estimator, the loss and the rollout
            correction, such as `clip_ratio_high`.
    """

    adv_estimator: str = "grpo"
    policy_loss: str = "vanilla"
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean", "prompt-mean"
    ] = "token-mean"
    loss_scale_factor: Positive | None = None
    entropy_coeff: FiniteFloat = 0.0
    kl_loss_coef: NotNegative = 0.0
    kl_loss_type: KLPenalty | None = None
    kl_coef: NotNegative = 0.0
    kl_penalty: KLPenalty | None = None
    target_kl: Positive | None = None
    horizon: Count | None = None
    bypass_mode: bool = False
    loss_denominator: Literal["original", "kept"] | None = None
    filter_groups: Literal["acc", "score"] | None = None
    max_num_gen_batches: Count | None = None
    overlong_buffer_len: Count | None = None
    overlong_penalty_factor: Positive | None = None
    reward_components: tuple[str, ...] = ()
    shuffle_rewards: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, requires in _REQUIRED.items():
            if getattr(self, key) is not None and not getattr(self, requires):
                raise ValueError(f"{key} has no effect without {requires}; set it, or remove {key}")
        if self.bypass_mode and self.loss_denominator is not None:
            raise ValueError("loss_denominator has no effect with bypass_mode, whose denominators count all tokens")

    @property
    def compares_responses(self) -> str | None:
        """The setting that compares the responses to a prompt, such as 'adv_estimator="grpo"'; None without one."""
        if self.filter_groups is not None:
            return f'filter_groups="{self.filter_groups}"'
        has_task = self.adv_estimator == "opd" and bool(self.options.get("opd_task_coef"))  # an advantage of GRPO
        return f'adv_estimator="{self.adv_estimator}"' if has_task or self.adv_estimator in _COMPARING else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig:
    """The reference policy of the KL divergence. With `model.lora` and no `path` it is the model without adapter.

    Attributes:
        path: folder of the model; None: the policy before the first step of reinforcement learning.
        param_offload: keep its weights on the CPU while they are not used.
        num_workers: number of processes of its own, each with one device; None: it shares the processes of the policy.
    """

    path: str | None = None
    param_offload: bool = False
    num_workers: Count | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticOptimizerConfig(OptimizerConfig):
    """The optimizer of the critic, with another default learning rate."""

    lr: NotNegative = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """The value model of the estimators "gae" and "vapo", trained on the same batches as the policy.

    Attributes:
        path: folder of the model, whose head is replaced by one output that starts at zero, unless it has one. None:
            the policy before the first step of reinforcement learning.
        optimizer: optimizer of the critic, as the section `optimizer`, but with 1e-5 as the default of `lr`.
        cliprange_value: values may change by this much in a step before their loss is clipped.
        ppo_epochs: passes over the batch.
        warmup_steps: number of steps at the beginning of reinforcement learning that train only the critic.
        param_offload: keep its weights on the CPU while they are not used.
        num_workers: number of processes of its own, each with one device; None: it shares the processes of the policy.
    """

    path: str | None = None
    optimizer: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    cliprange_value: Positive = 0.5
    ppo_epochs: Count = 1
    warmup_steps: CountOrZero = 0
    param_offload: bool = False
    num_workers: Count | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The teacher of on-policy distillation, for the estimator "opd" or the loss "forward_kl_topk".

    Its log-probs are those of its logits divided by `rollout.temperature`, like the log-probs of the policy.

    Attributes:
        path: folder of the model, with the tokenizer of the policy.
        topk: number of the teacher's most probable tokens whose log-probs "forward_kl_topk" reads at each position.
        param_offload: keep its weights on the CPU while they are not used.
        num_workers: number of processes of its own, each with one device; None: it shares the processes of the policy.
    """

    path: str | None = None
    topk: Count | None = None
    param_offload: bool = False
    num_workers: Count | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig:
    """A reward model: a model for sequence classification with one label, whose output is the score of an episode.

    The score is the output at the last token of the conversation, as transformers' `...ForSequenceClassification`
    computes it for the row without padding. `coef` times the score is added to the reward of the reward function or
    episode, or is the whole reward if there is none.

    Attributes:
        path: folder of the model, with the tokenizer of the policy; None: no reward model.
        coef: factor of the score in the reward.
        param_offload: keep its weights on the CPU while they are not used.
        num_workers: number of processes of its own, each with one device; None: it shares the processes of the policy.
    """

    path: str | None = None
    coef: Positive = 1.0
    param_offload: bool = False
    num_workers: Count | None = None
