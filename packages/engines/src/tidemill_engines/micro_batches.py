"""How a batch becomes micro-batches, equally many on every rank, and how their outputs get back into order."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from tidemill_dataproto import DataProto, ragged
from tidemill_dataproto.balance import count_micro_batches, rearrange_micro_batches

from tidemill_engines.agreement import describe, gather, raise_first
from tidemill_engines.batch_check import check_batch
from tidemill_engines.losses import Normalizer


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """The work of one rank for one batch.

    Attributes:
        micro_batches: as many as on every other rank; surplus ones have no rows.
        indices: for each micro-batch, which rows of the batch it holds, in its order.
        normalizer: over the global batch; None where no loss is wanted.
    """

    micro_batches: list[DataProto]
    indices: list[list[int]]
    normalizer: Normalizer | None


def num_micro_batches_needed(batch: DataProto, *, max_token_len: int, micro_batch_size: int | None) -> int:
    """How many micro-batches this rank's rows need by themselves; at least one.

    Raises:
        ValueError: a row is longer than `max_token_len`.
    """
    if micro_batch_size is not None:
        return max(1, -(-len(batch) // micro_batch_size))
    return count_micro_batches(ragged.lengths(batch["input_ids"]), max_token_len)


def prepare_micro_batches(
    batch: DataProto, *, max_token_len: int, micro_batch_size: int | None = None, num_micro_batches: int | None = None
) -> tuple[list[DataProto], list[list[int]]]:
    """Splits a batch into micro-batches, of `micro_batch_size` rows in order or else balanced by tokens.

    Args:
        batch: with the ragged column `input_ids`.
        max_token_len: no micro-batch has more tokens; ignored with `micro_batch_size`.
        micro_batch_size: rows per micro-batch.
        num_micro_batches: exactly as many come back, some without rows where there are too few; as many as needed
            where None.

    Returns:
        The micro-batches, and for each of them the rows of `batch` that it holds.

    Raises:
        ValueError: a row is longer than `max_token_len`, or `num_micro_batches` are too few.
    """
    needed = num_micro_batches_needed(batch, max_token_len=max_token_len, micro_batch_size=micro_batch_size)
    count = needed if num_micro_batches is None else num_micro_batches
    if micro_batch_size is None:
        return rearrange_micro_batches(batch, max_token_len, num_micro_batches=count)
    if count < needed:
        raise ValueError(f"{len(batch)} rows need {needed} micro-batches of {micro_batch_size}; got {count}")
    bounds = [min(number * micro_batch_size, len(batch)) for number in range(count + 1)]
    return [batch[start:end] for start, end in pairwise(bounds)], [list(range(*pair)) for pair in pairwise(bounds)]


def plan_batch(
    batch: DataProto,
    group: dist.ProcessGroup,
    *,
    vocab_size: int,
    max_token_len: int,
    micro_batch_size: int | None,
    with_loss: bool,
) -> BatchPlan:
    """Checks this rank's rows, agrees with the other ranks on counts, and splits. Collective over all dp ranks.

    Raises:
        ValueError, TypeError: what `check_batch` found, on every rank, naming the rank that it was found on.
    """
    error, count, trained = None, 0, (0.0, 0.0)
    try:
        check_batch(batch, vocab_size=vocab_size, max_token_len=max_token_len, training=with_loss)
        count = num_micro_batches_needed(batch, max_token_len=max_token_len, micro_batch_size=micro_batch_size)
        trained = count_trained(batch) if with_loss else trained
    except (ValueError, TypeError) as caught:
        error = caught
    reports = gather((describe(error), count, trained), group)
    raise_first([described for described, _, _ in reports], error)
    parts, indices = prepare_micro_batches(
        batch,
        max_token_len=max_token_len,
        micro_batch_size=micro_batch_size,
        num_micro_batches=max(count for _, count, _ in reports),
    )
    normalizer = None
    if with_loss:
        tokens, sequences = (sum(column) for column in zip(*(trained for _, _, trained in reports), strict=True))
        normalizer = Normalizer(num_tokens=max(tokens, 1.0), num_sequences=max(sequences, 1.0))
    return BatchPlan(micro_batches=parts, indices=indices, normalizer=normalizer)


def count_trained(batch: DataProto) -> tuple[float, float]:
    """The sum of `response_mask`, and the rows in which it is not zero everywhere."""
    column = batch["response_mask"]
    mask = ragged.values(column)
    trained_per_row = ragged.segment_sum((mask != 0).to(torch.float32), column)
    return mask.double().sum().item(), float((trained_per_row > 0).sum())


def restore_order(parts: list[torch.Tensor], indices: list[list[int]], column: torch.Tensor) -> torch.Tensor:
    """Puts the flat outputs of micro-batches back into the row order of the batch.

    Args:
        parts: per micro-batch the values of its rows, one after another.
        indices: as from `prepare_micro_batches`.
        column: ragged, of the whole batch, with the row lengths of the outputs.

    Returns:
        A ragged column with the layout of `column`.
    """
    order = torch.tensor([row for rows in indices for row in rows], dtype=torch.int64)
    shuffled = ragged.ragged(torch.cat(parts), ragged.lengths(column)[order])
    return ragged.like(ragged.values(ragged.index_rows(shuffled, order.argsort())), column)
