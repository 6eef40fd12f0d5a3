"""How old the weights were that sampled the tokens of a batch."""

from collections.abc import Sequence

import torch
from tidemill_dataproto import DataProto


class StalenessError(RuntimeError):
    """A token is older than `rollout.max_staleness` allows; the message has its row."""


def staleness_of(batch: DataProto, version: int, *, of_keys: bool = False) -> torch.Tensor:
    """Return the number of updates between the weights that sampled each token and those that are trained.

    Args:
        batch: rows with the object column `versions`: runs of (version, number of tokens).
        version: version of the weights that are trained, which is the number of updates so far.
        of_keys: count from the weights that computed the oldest keys and values of the row instead, if they are kept.

    Returns:
        int64 [T], for the T tokens with mask 1, row after row.
    """
    rows = batch.non_tensor_batch["versions"]
    runs: Sequence[tuple[str, int]] = [(row[0][0] if of_keys else name, count) for row in rows for name, count in row]
    ages = torch.tensor([version - int(name) for name, _ in runs], dtype=torch.int64)
    return ages.repeat_interleave(torch.tensor([count for _, count in runs], dtype=torch.int64))


def check_staleness(batch: DataProto, version: int, max_staleness: int) -> dict[str, float]:
    """Check that no token of a batch is too old to be trained on.

    Args:
        batch: as in `staleness_of`.
        version: as in `staleness_of`.
        max_staleness: `rollout.max_staleness`.

    Returns:
        `staleness/mean` and `staleness/max` over tokens, and `staleness/mixed_rows`, the share of rows with tokens of
        several versions.

    Raises:
        StalenessError: a token is older, or newer than the weights that are trained.
    """
    ages = staleness_of(batch, version)
    oldest, newest = (ages.max().item(), ages.min().item()) if len(ages) else (0, 0)
    if oldest > max_staleness or newest < 0:
        wrong = oldest if oldest > max_staleness else newest
        row = next(
            number
            for number, runs in enumerate(batch.non_tensor_batch["versions"])
            if any(version - int(name) == wrong for name, _ in runs)
        )
        raise StalenessError(
            f"row {row}, of episode {batch['episode'][row].item()}, has a token of weight version {version - wrong}, "
            f"and version {version} is trained with rollout.max_staleness={max_staleness}; this is an error of "
            "tidemill, please report it"
        )
    mixed = sum(len(runs) > 1 for runs in batch.non_tensor_batch["versions"])
    return {
        "staleness/mean": ages.double().mean().item() if len(ages) else 0.0,
        "staleness/max": float(oldest),
        "staleness/mixed_rows": mixed / len(batch),
    }
