"""Advantages of on-policy distillation."""

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.advantages.contract import refuse_token_rewards
from tidemill_algorithms.advantages.grpo import grpo
from tidemill_algorithms.columns import reads

__all__ = ["opd"]


@reads("teacher_log_prob", "old_log_probs")
def opd(batch: DataProto, *, opd_kl_coef: float = 1.0, opd_task_coef: float = 0.0) -> dict[str, torch.Tensor]:
    """Compute opd_kl_coef * (log pi_teacher - log pi_old) per token, plus opd_task_coef times the advantage of `grpo`.

    On-policy distillation as a policy gradient (Agarwal et al. 2023, arXiv:2306.13649, with the reverse KL divergence):
    on tokens of the policy, the expected gradient is that of KL(pi | teacher) per token, without the influence of a
    token on later ones. Without a task coefficient the rewards do not matter, and neither do groups.

    Args:
        batch: ragged `response_mask`, `teacher_log_prob` and `old_log_probs`, and with a task coefficient the columns
            of `Groups.of`.
        opd_kl_coef: weight of the teacher.
        opd_task_coef: weight of the reward.

    Returns:
        `advantages`, ragged float32 [B, j], 0 where the mask is 0.

    Raises:
        ValueError: the batch has `token_level_rewards`, which would have no effect.

    >>> columns = {"teacher_log_prob": torch.full((6,), -1.0), "old_log_probs": torch.full((6,), -1.5)}
    >>> columns = {name: ragged.like(values, mask) for name, values in columns.items()}
    >>> ragged.values(opd(batch.union(DataProto.from_dict(columns)), opd_task_coef=1.0)["advantages"])
    tensor([ 1.2071,  1.2071, -0.2071, -0.2071, -0.2071,  0.5000])
    """
    refuse_token_rewards(batch)
    response_mask = batch["response_mask"]
    teacher, old = (ragged.values(batch[name]) for name in ("teacher_log_prob", "old_log_probs"))
    advantages = opd_kl_coef * (teacher - old)
    if opd_task_coef != 0.0:
        advantages = advantages + opd_task_coef * ragged.values(grpo(batch)["advantages"])
    is_masked = ~ragged.values(response_mask).bool()
    return {"advantages": ragged.like(advantages.float().masked_fill(is_masked, 0.0), response_mask)}
