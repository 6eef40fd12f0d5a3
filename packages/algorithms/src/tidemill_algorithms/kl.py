"""Estimates of the KL divergence from a reference policy, and controllers of its coefficient."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = ["AdaptiveKLController", "FixedKLController", "KLPenalty", "check_kl_penalty", "kl_penalty"]

KLPenalty = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"
]  # fmt: skip


def kl_penalty(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: KLPenalty) -> torch.Tensor:
    """Estimate KL(pi | ref) at each sampled token (Schulman, http://joschu.net/blog/kl-approx.html).

    The names are verl's. For tokens sampled from pi, as a term of the loss each has the expected gradient of:

    | name | value, d = log pi - log ref | expected gradient |
    |---|---|---|
    | kl, k1 | d | zero: no regularisation at all |
    | abs | abs(d) | no divergence |
    | mse, k2 | d^2 / 2 | KL(pi, ref) |
    | low_var_kl, k3 | exp(-d) - 1 + d | KL(ref, pi), the other direction |
    | any of kl, k1, abs, low_var_kl, k3 with + | as without + | KL(pi, ref): the gradient is that of k2 |

    In the reward, only the value matters: k1 and k3 have the mean KL(pi, ref), k2 and abs do not. As verl does, k3
    clamps d to +-20 and its value to 10; a clamped token has no gradient.

    Args:
        log_prob: of the policy, any shape.
        ref_log_prob: of the reference, the same shape.
        kind: name of the estimate.

    Raises:
        ValueError: an unknown name.

    >>> log_prob, ref_log_prob = torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -1.5])
    >>> kl_penalty(log_prob, ref_log_prob, "k1")
    tensor([ 0.1000, -0.5000])
    >>> kl_penalty(log_prob, ref_log_prob, "k3")
    tensor([0.0048, 0.1487])
    """
    check_kl_penalty(kind)
    difference = log_prob - ref_log_prob
    square = 0.5 * difference.square()
    name = kind.removesuffix("+")
    if name in ("kl", "k1"):
        value = difference
    elif name == "abs":
        value = difference.abs()
    elif name in ("mse", "k2"):
        value = square
    else:
        bounded = difference.clamp(-20.0, 20.0)
        value = ((-bounded).exp() - 1 + bounded).clamp(max=10.0)
    return value.detach() + (square - square.detach()) if kind.endswith("+") else value


def check_kl_penalty(kind: str) -> None:
    """Raise ValueError for a name that `kl_penalty` does not have."""
    if kind not in get_args(KLPenalty):
        raise ValueError(f"the KL penalty must be one of {', '.join(get_args(KLPenalty))}, got {kind!r}")


@dataclass(kw_only=True, slots=True)
class FixedKLController:
    """A constant coefficient.

    Attributes:
        kl_coef: coefficient of the KL penalty.
    """

    kl_coef: float

    def update(self, current_kl: float, num_samples: int) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.kl_coef = state["kl_coef"]


@dataclass(kw_only=True, slots=True)
class AdaptiveKLController:
    """A coefficient that keeps the KL divergence near a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Attributes:
        kl_coef: coefficient of the KL penalty; at first the initial one.
        target_kl: wanted KL divergence, > 0.
        horizon: number of samples in which a KL of 1.2 times the target or more raises the coefficient by 20%, > 0.

    Raises:
        ValueError: a target or horizon of 0 or less.

    >>> controller = AdaptiveKLController(kl_coef=0.1, target_kl=2.0, horizon=1000)
    >>> controller.update(2.2, num_samples=500)
    >>> round(controller.kl_coef, 6)
    0.105
    """

    kl_coef: float
    target_kl: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("target_kl", "horizon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")

    def update(self, current_kl: float, num_samples: int) -> None:
        """Change the coefficient after a batch with the mean divergence `current_kl`, by at most 20%."""
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.kl_coef *= 1 + error * min(num_samples / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient; target and horizon belong to the configuration."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.kl_coef = state["kl_coef"]
