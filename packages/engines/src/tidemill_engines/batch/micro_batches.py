"""Split a batch into micro-batches, the same number on every rank, and restore the row order of their outputs."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from tidemill_dataproto import DataProto, ragged
from tidemill_dataproto.balance import quadratic_workload
from tidemill_dataproto.dynamic_batch import Workload, count_micro_batches, rearrange_micro_batches

from tidemill_engines.batch.check import BatchRules, TokenLimit, check_batch
from tidemill_engines.batch.multi_modal import kinds_in
from tidemill_engines.batch.padded import is_padded, response_attention_mask, to_padded, to_ragged
from tidemill_engines.batch.topk_request import NUM_MOST_PROBABLE
from tidemill_engines.distributed.agreement import all_gather, describe_error, raise_first_error
from tidemill_engines.loss.contract import Normalizer


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """The work of one rank for one batch.

    Attributes:
        micro_batches: micro-batches, the same number as on every other rank; surplus ones have no rows.
        indices: for each micro-batch the indices of its rows in the batch.
        normalizer: normalizer of the global batch; None without a loss.
        responses: ragged column of the responses of all rows, in row order.
        response_mask: [B, R] mask of padded responses; None if the batch is ragged.
    """

    micro_batches: list[DataProto]
    indices: list[list[int]]
    normalizer: Normalizer | None
    responses: torch.Tensor
    response_mask: torch.Tensor | None

    def restore(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the flat outputs of the micro-batches as a column of the batch, ragged or padded like the batch."""
        column = restore_order(parts, self.indices, self.responses)
        return column if self.response_mask is None else to_padded(column, self.response_mask)


def num_micro_batches_needed(batch: DataProto, *, max_token_len: int, micro_batch_size: int | None) -> int:
    """Return the number of micro-batches that this rank's rows require, at least one.

    Raises:
        ValueError: a row is longer than `max_token_len`.
    """
    if micro_batch_size is not None:
        return max(1, -(-len(batch) // micro_batch_size))
    return count_micro_batches(ragged.lengths(batch["input_ids"]), max_token_len)


def prepare_micro_batches(
    batch: DataProto,
    *,
    max_token_len: int,
    micro_batch_size: int | None = None,
    num_micro_batches: int | None = None,
    workload: Workload | None = None,
) -> tuple[list[DataProto], list[list[int]]]:
    """Split a batch into micro-batches, of `micro_batch_size` consecutive rows or else balanced, most work first.

    Args:
        batch: batch with the ragged column `input_ids`.
        max_token_len: maximum tokens per micro-batch; ignored with `micro_batch_size`.
        micro_batch_size: rows per micro-batch; None balances them.
        num_micro_batches: number of micro-batches to return, some without rows if there are too few rows; None is the
            required number.
        workload: work of each row, from the row lengths; None is the number of tokens.

    Returns:
        The micro-batches, and for each of them the indices of its rows in `batch`.

    Raises:
        ValueError: a row is longer than `max_token_len`, or `num_micro_batches` is too small.
    """
    needed = num_micro_batches_needed(batch, max_token_len=max_token_len, micro_batch_size=micro_batch_size)
    count = needed if num_micro_batches is None else num_micro_batches
    if micro_batch_size is None:
        return rearrange_micro_batches(batch, max_token_len, num_micro_batches=count, workload=workload)
    if count < needed:
        raise ValueError(
            f"num_micro_batches must be at least {needed} for {len(batch)} rows in micro-batches of "
            f"{micro_batch_size}; got {count}"
        )
    bounds = [min(number * micro_batch_size, len(batch)) for number in range(count + 1)]
    return [batch[start:end] for start, end in pairwise(bounds)], [list(range(*pair)) for pair in pairwise(bounds)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What the ranks exchange about their rows before any of them starts."""

    part: int
    error: tuple[str, str] | None = None
    columns: frozenset[str] = frozenset()
    fingerprint: tuple[float, ...] = ()
    num_micro_batches: int = 0
    trained: tuple[float, float] = (0.0, 0.0)
    vision_kinds: frozenset[str] = frozenset()


def plan_batch(
    batch: DataProto,
    group: dist.ProcessGroup,
    rules: BatchRules,
    *,
    data_parallel_rank: int,
    micro_batch_size: int | None,
    hidden_size: int,
    with_loss: bool,
    multiple_of: int = 1,
) -> BatchPlan:
    """Check this rank's rows, agree with the other ranks on counts, and split the batch. Collective.

    Micro-batches have about the same work, including that of attention, and each rank begins with those that have the
    most: pipeline stages and data-parallel ranks, which wait for each other in each micro-batch, wait less.

    If a row of any rank has images or videos, `meta_info["vision_kinds"]` of every micro-batch lists them, because all
    ranks must compute the same layers.

    Args:
        group: gloo group of all ranks.
        data_parallel_rank: which part of the global batch `batch` is; ranks of the same part must have the same rows.
        hidden_size: of the model, for `quadratic_workload`.
        multiple_of: divisor of the number of micro-batches.

    Raises:
        ValueError, TypeError: an error of `check_batch`, a micro-batch of `micro_batch_size` rows above the limit,
            ranks with different columns, or ranks of one part with different rows. Raised on every rank, with the
            number of the failing rank.
    """
    error, padding, own = None, None, _Report(part=data_parallel_rank)
    try:
        batch, padding = _ragged_on_cpu(batch)
        check_batch(batch, rules, training=with_loss)
        if micro_batch_size is not None:
            _check_fixed_micro_batches(batch, micro_batch_size, rules.limit)
        own = _report(batch, data_parallel_rank, rules.limit, micro_batch_size, with_loss=with_loss)
    except Exception as caught:  # noqa: BLE001 - raised below, on every rank
        error, own = caught, _Report(part=data_parallel_rank, error=describe_error(caught))
    reports: list[_Report] = all_gather(own, group)
    raise_first_error([report.error for report in reports], error)
    _check_same_columns(reports)
    parts = _one_per_part(reports)
    needed = max(report.num_micro_batches for report in parts)
    micro_batches, indices = prepare_micro_batches(
        batch,
        max_token_len=rules.limit.total,
        micro_batch_size=micro_batch_size,
        num_micro_batches=-(-needed // multiple_of) * multiple_of,
        workload=partial(quadratic_workload, hidden_size=hidden_size),
    )
    if rules.vision is not None:
        for micro_batch in micro_batches:
            micro_batch.meta_info["vision_kinds"] = sorted({kind for part in parts for kind in part.vision_kinds})
    return BatchPlan(
        micro_batches=micro_batches,
        indices=indices,
        normalizer=_normalizer(parts) if with_loss else None,
        responses=batch["responses"],
        response_mask=padding,
    )


def _report(
    batch: DataProto, part: int, limit: TokenLimit, micro_batch_size: int | None, *, with_loss: bool
) -> _Report:
    return _Report(
        part=part,
        columns=_tensor_columns(batch),
        fingerprint=_fingerprint(batch),
        num_micro_batches=num_micro_batches_needed(batch, max_token_len=limit.total, micro_batch_size=micro_batch_size),
        trained=count_trained(batch) if with_loss else (0.0, 0.0),
        vision_kinds=kinds_in(batch),
    )


def _ragged_on_cpu(batch: DataProto) -> tuple[DataProto, torch.Tensor | None]:
    """Return the batch with ragged columns on the CPU, and the response mask if it was padded.

    The checks read it on the CPU; micro-batches are copied to the device one by one.
    """
    if not isinstance(batch, DataProto):
        raise TypeError(f"batch must be a DataProto, got a {type(batch).__name__}; create it with DataProto.from_dict")
    batch = batch.to("cpu")
    return (to_ragged(batch), response_attention_mask(batch)) if is_padded(batch) else (batch, None)


def _tensor_columns(batch: DataProto) -> frozenset[str]:
    assert batch.batch is not None
    return frozenset(batch.batch.keys())


def _check_same_columns(reports: list[_Report]) -> None:
    """Reject columns that some ranks lack: a loss would fail there while the other ranks wait in a collective."""
    for name in sorted(frozenset[str]().union(*(report.columns for report in reports))):
        has = [name in report.columns for report in reports]
        if not all(has):
            raise ValueError(
                f"the batch of rank {has.index(False)} lacks the column {name}, which the batch of rank "
                f"{has.index(True)} has; pass the same columns on all ranks"
            )


def _one_per_part(reports: list[_Report]) -> list[_Report]:
    first: dict[int, tuple[int, _Report]] = {}
    for rank, report in enumerate(reports):
        other, known = first.setdefault(report.part, (rank, report))
        if known.fingerprint != report.fingerprint:
            raise ValueError(
                f"ranks {other} and {rank} share the rows of data-parallel rank {report.part} but received different "
                "rows; pass the same batch on all ranks with the same get_data_parallel_rank()"
            )
    return [report for _, report in first.values()]


def _normalizer(parts: list[_Report]) -> Normalizer:
    tokens, sequences = (sum(column) for column in zip(*(report.trained for report in parts), strict=True))
    return Normalizer(num_tokens=max(tokens, 1.0), num_sequences=max(sequences, 1.0))


def _fingerprint(batch: DataProto) -> tuple[float, ...]:
    """Return numbers that differ if tokens, mask or settings of two batches differ, except for hash collisions."""
    tokens = ragged.values(batch["input_ids"]).long()
    compared = [tokens, torch.cat([ragged.lengths(batch["input_ids"]), ragged.lengths(batch["responses"])])]
    if "response_mask" in batch:
        compared.append(ragged.values(batch["response_mask"]).float().view(torch.int32).long())
    return (
        len(batch),
        len(tokens),
        batch.meta_info.get("temperature", 1.0),
        batch.meta_info.get(NUM_MOST_PROBABLE, 0),
        *(int((x * (torch.arange(1, len(x) + 1) * 0x9E3779B1)).sum()) for x in compared),
    )


def _check_fixed_micro_batches(batch: DataProto, micro_batch_size: int, limit: TokenLimit) -> None:
    for number, lengths in enumerate(ragged.lengths(batch["input_ids"]).split(micro_batch_size)):
        if len(lengths) and int(lengths.sum()) > limit.total:
            raise ValueError(
                f"micro-batch {number} of micro_batch_size_per_gpu={micro_batch_size} rows has {int(lengths.sum())} "
                f"tokens, above {limit}; lower micro_batch_size_per_gpu, raise max_token_len_per_gpu, or leave "
                "micro_batch_size_per_gpu at None to balance micro-batches by tokens"
            )


def count_trained(batch: DataProto) -> tuple[float, float]:
    """Return the sum of `response_mask`, and the number of rows with a nonzero element of it."""
    column = batch["response_mask"]
    mask = ragged.values(column)
    trained_per_row = ragged.segment_sum((mask != 0).to(torch.float32), column)
    return mask.double().sum().item(), float((trained_per_row > 0).sum())


def restore_order(parts: list[torch.Tensor], indices: list[list[int]], column: torch.Tensor) -> torch.Tensor:
    """Restore the row order of the batch in the flat outputs of its micro-batches.

    Args:
        parts: per micro-batch the values of its rows, concatenated.
        indices: row indices of `prepare_micro_batches`.
        column: ragged column of the whole batch with the row lengths of the outputs.

    Returns:
        A ragged column with the layout of `column`.
    """
    order = torch.tensor([row for rows in indices for row in rows], dtype=torch.int64)
    shuffled = ragged.ragged(torch.cat(parts), ragged.lengths(column)[order])
    return ragged.like(ragged.values(ragged.index_rows(shuffled, order.argsort())), column)
