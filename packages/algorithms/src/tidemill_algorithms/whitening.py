"""Whitening over the trained tokens of a batch."""

import numpy as np
import torch
from tidemill_dataproto import ragged

__all__ = ["whiten"]

_CHUNK = 1 << 16  # elements, so that float64 copies stay in the cache of a core


def whiten(column: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + 1e-8), with both over all trained tokens of the batch.

    The variance is unbiased, and every trained token has the same weight, so long rows weigh more than short ones.
    Whiten a global batch before it is split: the statistics of a part differ.

    Args:
        column: ragged float [B, j].
        response_mask: ragged [B, j], 1 for trained tokens.

    Returns:
        ragged float32 [B, j], 0 where the mask is 0; 0 everywhere if all trained tokens have the same value.

    >>> column = ragged.like(torch.tensor([1.0, 1.0, 4.0, 4.0, 4.0, 4.0]), mask)
    >>> ragged.values(whiten(column, mask))
    tensor([-1.2910, -1.2910,  0.6455,  0.6455,  0.6455,  0.6455])
    """
    flat, mask = ragged.values(column).detach().float().numpy(), ragged.values(response_mask).bool().numpy()
    parts = [slice(start, start + _CHUNK) for start in range(0, len(flat), _CHUNK)]
    count = max(int(mask.sum()), 1)
    mean = sum(flat[part].sum(where=mask[part], dtype=np.float64) for part in parts) / count
    squares = 0.0
    for part in parts:
        centred = np.where(mask[part], flat[part] - mean, 0.0)
        squares += float(centred @ centred)
    scale = 1.0 / np.sqrt(squares / max(count - 1, 1) + 1e-8)
    out = np.empty(len(flat), dtype=np.float32)
    for part in parts:
        out[part] = np.where(mask[part], (flat[part] - mean) * scale, 0.0)
    return ragged.like(torch.from_numpy(out), column)
