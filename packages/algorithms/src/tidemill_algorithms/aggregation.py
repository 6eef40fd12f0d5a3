"""The weight of each token in the loss of a global mini-batch: the only place with denominators."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from tidemill_dataproto import ragged

__all__ = ["AggMode", "token_weights"]

AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean", "prompt-mean"]


def token_weights(
    response_mask: torch.Tensor,
    mode: AggMode,
    *,
    uid: Sequence[Any] | np.ndarray | None = None,
    loss_scale_factor: float | None = None,
    kept: torch.Tensor | None = None,
    denominator: Literal["original", "kept"] = "original",
) -> torch.Tensor:
    """Return the weight of each token, so that the loss is the sum of weight times term over all tokens.

    Compute it once over the whole global mini-batch; then the loss and its gradient do not depend on how the batch is
    split. A row without a trained token is not a sequence.

    | mode | weight of a trained token | paper |
    |---|---|---|
    | token-mean | 1 / tokens | DAPO, arXiv:2503.14476 |
    | seq-mean-token-sum | 1 / sequences | |
    | seq-mean-token-sum-norm | 1 / sequences / `loss_scale_factor` | Dr. GRPO, arXiv:2503.20783 |
    | seq-mean-token-mean | 1 / sequences / tokens of the sequence | GRPO, arXiv:2402.03300 |
    | prompt-mean | 1 / prompts / tokens of all rows of the prompt | |

    Args:
        response_mask: ragged [B, j], 1 for trained tokens; a fraction is the weight of its token.
        mode: see above.
        uid: problem of each row [B], required by prompt-mean.
        loss_scale_factor: a constant such as the maximum response length, required by seq-mean-token-sum-norm. verl
            falls back to the padded width of the batch.
        kept: ragged [B, j], 0 for tokens that a correction rejects; their weight is 0.
        denominator: count all trained tokens ("original": rejected tokens lower the loss) or only kept ones ("kept":
            the remaining tokens weigh more).

    Returns:
        Ragged float32 [B, j]; 0 where the mask or `kept` is 0.

    Raises:
        ValueError: an unknown mode; an argument that the mode requires is missing; one except `uid` has no effect.

    >>> ragged.values(token_weights(mask, "seq-mean-token-mean"))
    tensor([0.1667, 0.1667, 0.1111, 0.1111, 0.1111, 0.3333])
    >>> ragged.values(token_weights(mask, "prompt-mean", uid=["a", "a", "b"]))
    tensor([0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.5000])
    """
    _check(mode, uid, loss_scale_factor, kept, denominator)
    numerator = mask = ragged.values(response_mask).float()
    if kept is not None:
        numerator = mask * ragged.values(kept).float()
    counted = numerator if denominator == "kept" else mask
    tokens = ragged.segment_sum(counted, response_mask)
    if mode == "token-mean":
        weights = numerator / (float(counted.double().sum()) or 1.0)
    elif mode == "prompt-mean":
        assert uid is not None
        _, prompt = np.unique(np.asarray(uid, dtype=str), return_inverse=True)
        prompt = torch.from_numpy(prompt.reshape(-1).astype(np.int64)).to(mask.device)
        of_prompt = tokens.new_zeros(len(tokens)).index_add_(0, prompt, tokens)
        num_prompts = max(int((of_prompt > 0).sum()), 1)
        weights = numerator / ragged.expand_rows(_divisor(of_prompt)[prompt], response_mask) / num_prompts
    else:
        num_sequences = max(int((tokens > 0).sum()), 1)
        if mode == "seq-mean-token-mean":
            numerator = numerator / ragged.expand_rows(_divisor(tokens), response_mask)
        weights = numerator / num_sequences
        if loss_scale_factor is not None:
            weights = weights / loss_scale_factor
    return ragged.like(weights, response_mask)


def _divisor(sums: torch.Tensor) -> torch.Tensor:
    """Return sums of weights, and 1 where nothing is divided."""
    return torch.where(sums > 0, sums, 1.0)


def _check(mode: str, uid: Any, loss_scale_factor: float | None, kept: torch.Tensor | None, denominator: str) -> None:
    modes = get_args(AggMode)
    if mode not in modes:
        raise ValueError(f"loss_agg_mode must be one of {', '.join(modes)}, got {mode!r}")
    if denominator not in ("original", "kept"):
        raise ValueError(f'denominator must be "original" or "kept", got {denominator!r}')
    if denominator == "kept" and kept is None:
        raise ValueError('denominator="kept" requires `kept`, the mask of the correction')
    if mode == "prompt-mean" and uid is None:
        raise ValueError("prompt-mean requires `uid`, the problem of each row")
    has_norm = mode == "seq-mean-token-sum-norm"
    if has_norm and (loss_scale_factor is None or loss_scale_factor <= 0):
        raise ValueError(
            "seq-mean-token-sum-norm requires a constant loss_scale_factor > 0, such as the maximum response length; "
            f"got {loss_scale_factor}"
        )
    if not has_norm and loss_scale_factor is not None:
        raise ValueError(f"loss_scale_factor={loss_scale_factor} has no effect with {mode}; drop it")
