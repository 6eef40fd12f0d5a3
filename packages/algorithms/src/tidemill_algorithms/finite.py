"""The error of a loss that is not finite."""

from collections.abc import Mapping

import torch
from tidemill_dataproto import DataProto, ragged

__all__ = ["check_finite"]

_COLUMNS = (
    "old_log_probs",
    "ref_log_prob",
    "advantages",
    "values",
    "returns",
    "rollout_is_weights",
    "loss_weights",
    "response_mask",
)


def check_finite(
    loss: torch.Tensor, shares: Mapping[str, torch.Tensor], batch: DataProto, outputs: Mapping[str, torch.Tensor]
) -> None:
    """Raise ValueError if a loss is not finite, with the first token that is the cause. Reads one number of a device.

    Args:
        loss: 0-d.
        shares: by name, the flat values [N] that were added up.
        batch: the micro-batch.
        outputs: by name, flat outputs of the model [N].
    """
    if torch.isfinite(loss.detach()):
        return
    offsets = ragged.offsets(batch["response_mask"])
    for name, share in shares.items():
        bad = (~torch.isfinite(share.detach())).nonzero()
        if not len(bad):
            continue
        token = int(bad[0])
        row = int(torch.searchsorted(offsets, token, right=True)) - 1
        uid = f" (uid {batch.non_tensor_batch['uid'][row]})" if "uid" in batch.non_tensor_batch else ""
        columns = {column: ragged.values(batch[column]) for column in _COLUMNS if column in batch.batch.keys()}  # noqa: SIM118
        values = ", ".join(f"{column} {flat[token].item():g}" for column, flat in {**outputs, **columns}.items())
        raise ValueError(
            f"expected a finite {name}, got {share[token].item()} at row {row}{uid} of the micro-batch, response token "
            f"{token - int(offsets[row])}: {values}"
        )
    raise ValueError(f"expected a finite loss, got {loss.item()}, the sum of finite terms; look for huge advantages")
