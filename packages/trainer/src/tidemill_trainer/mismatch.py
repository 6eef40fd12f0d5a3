"""The gate on the difference between the log-probs of rollout and training."""

import torch
from tidemill_dataproto import DataProto

_LIMITS = {"float32": 0.005, "float16": 0.01, "bfloat16": 0.05, "fp8": 0.2}
_LATER = 4.0


class MismatchError(RuntimeError):
    """The engines do not sample from the policy that is trained, or a replay differs; the message says how."""


class MismatchGate:
    """Compare the log-probs of rollout and training, and stop the run if they do not belong to the same policy.

    The mean of |rollout - training| over the tokens of a batch has a limit: 0.005 if both compute in float32, 0.01 with
    float16, 0.05 with bfloat16 and 0.2 with fp8 rollouts. It applies to the first batch after each start and resume,
    and after the restart of an engine; later batches may have four times as much. Stale or wrong weights, another chat
    template or other sampling parameters exceed it.

    Args:
        limit: limit for the first batch after a start; None: by dtype.
        dtypes: dtypes of the weights in the engines (or "fp8") and in training.
    """

    def __init__(self, limit: float | None, dtypes: tuple[str, ...]) -> None:
        self._limit = max(_LIMITS.get(dtype, 0.05) for dtype in dtypes) if limit is None else limit
        self._num_starts: int | None = None

    def check(self, batch: DataProto, staleness: torch.Tensor, num_starts: int = 0) -> dict[str, float]:
        """Check a batch with `rollout_log_probs`, `old_log_probs` and `response_mask`.

        Args:
            batch: batch of a step.
            staleness: number of updates since each token with mask 1 was sampled, int64 [T].
            num_starts: engines that were added or started again since the start of the run.

        Returns:
            `rollout/log_prob_abs_diff/mean` and `/max` of all tokens.

        Raises:
            MismatchError: the mean difference exceeds the limit, or a log-prob is positive or not finite.
        """
        mask = batch["response_mask"].values().bool()
        rollout, training = (batch[name].values()[mask] for name in ("rollout_log_probs", "old_log_probs"))
        for name, values in (("rollout", rollout), ("training", training)):
            is_wrong = ~(torch.isfinite(values) & (values <= 1e-6))  # rounding in training
            if is_wrong.any():
                raise MismatchError(
                    f"{int(is_wrong.sum())} of {len(values)} log-probs of {name} are positive or not finite, the first "
                    f"is {values[is_wrong][0].item()}"
                )
        difference = (rollout - training).abs()
        mean, largest = (difference.mean().item(), difference.max().item()) if len(difference) else (0.0, 0.0)
        fresh = difference[staleness == 0]
        if len(fresh):
            self._check_fresh(fresh, _LATER * self._limit if num_starts == self._num_starts else self._limit)
            self._num_starts = num_starts
        return {"rollout/log_prob_abs_diff/mean": mean, "rollout/log_prob_abs_diff/max": largest}

    @staticmethod
    def _check_fresh(difference: torch.Tensor, limit: float) -> None:
        if (mean := difference.mean().item()) > limit:
            raise MismatchError(
                f"the log-probs of rollout and training differ by {mean:.3g} on average, more than {limit:g} (largest "
                f"difference {difference.max().item():.3g}, {len(difference)} tokens): the engines do not sample from "
                "the policy that is trained. Check that both load the same model, dtype and chat template; raise "
                "rollout.max_log_prob_abs_diff only if the difference is expected"
            )
