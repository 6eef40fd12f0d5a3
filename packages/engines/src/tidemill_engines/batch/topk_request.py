"""The token ids, other than the response tokens, whose log-probabilities a batch requests."""

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.distributed.device import to_device
from tidemill_engines.model_io import TopKRequest

IDS = "topk_ids"
"""Column [B, j, k] with k ids for each response token."""
NUM_MOST_PROBABLE = "num_topk"
"""Key of `meta_info` with the number of most probable ids; set by `infer_batch`."""


def topk_request(micro_batch: DataProto, predicted: slice | torch.Tensor, device: torch.device) -> TopKRequest:
    """Read the request of a checked micro-batch on the CPU, for some of its response tokens."""
    k = micro_batch.meta_info.get(NUM_MOST_PROBABLE)
    if not _has_ids(micro_batch):
        return TopKRequest(k=k)
    return TopKRequest(k=k, ids=to_device(ragged.values(micro_batch[IDS])[predicted], device))


def check_topk(batch: DataProto, vocab_size: int) -> None:
    """Check the request of a batch.

    Raises:
        ValueError: both kinds of ids are requested, their number is outside 1..vocab_size, the column is not shaped
            like `responses` with k more numbers, or contains ids outside the vocabulary.
        TypeError: the column does not contain integers.
    """
    k = batch.meta_info.get(NUM_MOST_PROBABLE)
    if k is not None and not 1 <= k <= vocab_size:
        raise ValueError(f"top_k must be between 1 and the size of the vocabulary, {vocab_size}; got {k}")
    if not _has_ids(batch):
        return
    if k is not None:
        raise ValueError(f"top_k requests the most probable ids, but the batch has a column {IDS}; drop one of them")
    column = batch[IDS]
    lengths = ragged.lengths(batch["responses"])
    if not ragged.is_ragged(column) or column.dim() != 3 or not torch.equal(ragged.lengths(column), lengths):
        raise ValueError(f"column {IDS} must have k ids for each response token, [B, j, k], ragged like responses")
    ids = ragged.values(column)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"column {IDS} must be int32 or int64 token ids, got {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"column {IDS} must contain token ids of the model's vocabulary of {vocab_size}, got {int(ids.min())} to "
            f"{int(ids.max())}; take them from a model with the same tokenizer"
        )


def _has_ids(batch: DataProto) -> bool:
    return batch.batch is not None and IDS in batch.batch.keys()  # noqa: SIM118 - a TensorDict
