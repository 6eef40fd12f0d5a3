"""The forward KL divergence from a teacher, over its k most probable tokens and the rest of the vocabulary."""

import math

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.columns import reads

__all__ = ["forward_kl_topk"]

_SMALLEST_REST = 1e-6  # float32 does not resolve smaller differences of 1 and a sum of probabilities


@reads("topk_ids", "teacher_topk_log_probs")
def forward_kl_topk(log_probs: torch.Tensor, batch: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute KL(teacher, pi) of k + 1 outcomes for each token: each of the k ids, and any other id.

    This is sum_k p_T (log p_T - log p) + rest_T (log rest_T - log rest) with rest = 1 - sum_k p. With the rest it is a
    divergence: >= 0, and 0 only for the teacher's distribution over these outcomes. Without it, as in verl's loss of
    the same name, all probability is on the k ids at the minimum. For tokens sampled by the policy this is the forward
    KL of on-policy distillation (GKD, Agarwal et al. 2024, arXiv:2306.13649). A rest below 1e-6 counts as 1e-6 and has
    no gradient.

    Args:
        log_probs: [N], of the sampled tokens; not used.
        batch: ragged [B, j, k] `topk_log_probs` of the policy, with gradient, and `teacher_topk_log_probs` of the
            teacher, for the same distinct ids `topk_ids`.

    Returns:
        Terms [N]; metrics `actor/topk_mass` and `actor/teacher_topk_mass`, the probabilities of the k ids together.

    >>> teacher, policy = torch.tensor([[0.5, 0.25]]), torch.tensor([[0.25, 0.25]])  # rest: 0.25 and 0.5
    >>> columns = {"topk_log_probs": policy.log(), "teacher_topk_log_probs": teacher.log()}
    >>> columns = {name: ragged.ragged(values, [1]) for name, values in columns.items()}
    >>> forward_kl_topk(torch.zeros(1), DataProto.from_dict(columns))[0]  # 0.5 log 2 + 0.25 log 1 - 0.25 log 2
    tensor([0.1733])
    """
    topk, teacher = (ragged.values(batch[name]) for name in ("topk_log_probs", "teacher_topk_log_probs"))
    outcomes, of_teacher = _with_rest(topk), _with_rest(teacher)
    probs = of_teacher.exp()
    terms = torch.where(probs > 0, probs * (of_teacher - outcomes), 0.0).sum(-1)
    return terms, {
        "actor/topk_mass": topk.detach().exp().sum(-1),
        "actor/teacher_topk_mass": teacher.exp().sum(-1),
    }


def _with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """Append log(1 - sum_k p) to log-probabilities: [N, k] to [N, k + 1]."""
    log_mass = log_probs.logsumexp(-1, keepdim=True).clamp(max=math.log1p(-_SMALLEST_REST))
    # Mächler 2012, "Accurately computing log(1 - exp(-|a|))"
    rest = torch.where(log_mass > -math.log(2), (-log_mass.expm1()).log(), (-log_mass.exp()).log1p())
    return torch.cat([log_probs, rest], -1)
