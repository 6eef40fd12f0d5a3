"""Log-probabilities and entropy of tokens from logits."""

import torch


def token_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The log-probability of each label under softmax(logits / temperature), and optionally its entropy in nats.

    Args:
        logits: [N, V] of any float dtype; the arithmetic is in float32 at least.
        labels: [N] int64.

    Returns:
        log_probs [N] and entropy [N] or None, in float32 (float64 for float64 logits).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    # Not logit - logsumexp: it loses the digits that matter where the model is nearly certain and logits are large.
    log_p = logits.log_softmax(-1)
    log_probs = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return log_probs, -(log_p.exp() * log_p).sum(-1) if entropy else None
