"""Check a batch before a forward pass; the errors name the column, the row and the numbers."""

import math
from dataclasses import dataclass

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.batch.multi_modal import COLUMN, VisionRule, rows_with_images
from tidemill_engines.batch.packing import response_positions
from tidemill_engines.batch.topk_request import check_topk
from tidemill_engines.loss.router import ROUTED_EXPERTS

_INTEGERS = (torch.int64, torch.int32)
# Columns with one value per response token. With other lengths they would be aligned with wrong tokens, which a loss
# cannot detect.
_RESPONSE_COLUMNS = (
    "response_mask",
    "advantages",
    "returns",
    "values",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_prob",
    "teacher_log_prob",
    "teacher_topk_log_probs",
    "token_level_scores",
    "token_level_rewards",
    "rollout_is_weights",
    "loss_weights",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLimit:
    """Maximum tokens of a micro-batch: `per_rank` on each of the ranks that share its rows."""

    per_rank: int
    ranks_per_row: int = 1

    @property
    def total(self) -> int:
        return self.per_rank * self.ranks_per_row

    def __str__(self) -> str:
        shared = "" if self.ranks_per_row == 1 else f" on {self.ranks_per_row} ranks"
        return f"max_token_len_per_gpu={self.per_rank}{shared}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRules:
    """Requirements of an engine and its model on a batch.

    Attributes:
        vocab_size: token ids must be in 0..vocab_size-1.
        limit: maximum tokens of a micro-batch, and so of a row.
        max_position_embeddings: maximum tokens of a row for the model; None is no limit.
        max_unscaled: maximum tokens of a row for `attention.packed.max_unscaled`; None is no limit.
        replays: whether the batch may have the column `routed_experts`.
        vision: image rule of a vision-language model; None rejects images.
    """

    vocab_size: int
    limit: TokenLimit
    max_position_embeddings: int | None = None
    max_unscaled: int | None = None
    replays: bool = False
    vision: VisionRule | None = None


def check_batch(batch: DataProto, rules: BatchRules, *, training: bool) -> None:
    """Check a batch against the requirements; much cheaper than a forward pass.

    Args:
        training: whether `response_mask` is required.

    Raises:
        ValueError: a column is missing or has wrong lengths (including columns that losses commonly use), `input_ids`
            does not end with `responses`, a response has no token before it, a token id is outside the vocabulary, a
            row is too long, the temperature is not a positive number, images do not match their row or the model,
            the ids of `topk_ids` are invalid, or `routed_experts` would be ignored.
        TypeError: a column is not ragged, or has the wrong dtype.
    """
    _check_present(batch, ["input_ids", "responses", *(["response_mask"] if training else [])])
    _check_token_columns(batch)
    tokens, responses = batch["input_ids"], batch["responses"]
    lengths, response_lengths = ragged.lengths(tokens), ragged.lengths(responses)
    if training:
        _check_response_columns(batch, response_lengths)
    _check_rows(
        (response_lengths > 0) & (lengths <= response_lengths),
        "row {row} of input_ids has {a} tokens and its response {b}; input_ids must be prompt + response, with at "
        "least one prompt token",
        lengths,
        response_lengths,
    )
    _check_lengths(lengths, rules)
    _check_tokens(ragged.values(tokens), lengths, rules.vocab_size)
    _check_tail(tokens, responses)
    check_topk(batch, rules.vocab_size)
    temperature = batch.meta_info.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise ValueError(f"meta_info['temperature'] must be a positive number; got {temperature!r}")
    if not rules.replays and batch.batch is not None and ROUTED_EXPERTS in batch.batch.keys():  # noqa: SIM118 - a TensorDict
        raise ValueError(
            f"the batch has the column {ROUTED_EXPERTS}, which requires MegatronConfig.router_replay=True (FSDP2 does "
            "not support it); set it, or drop the column"
        )
    if rules.vision is not None:
        rules.vision.check(batch)
    elif rows_with_images(batch):
        row = rows_with_images(batch)[0][0]
        raise ValueError(f"row {row} has {COLUMN}, but the model supports text only; drop the column")


def _check_present(batch: DataProto, names: list[str]) -> None:
    present = [] if batch.batch is None else sorted(map(str, batch.batch.keys()))
    missing = [name for name in names if name not in present]
    if missing:
        raise ValueError(
            f"the batch lacks {', '.join(missing)}; add them. It has the tensor columns {', '.join(present) or '-'}"
        )


def _check_token_columns(batch: DataProto) -> None:
    for name in ("input_ids", "responses"):
        column = batch[name]
        if not ragged.is_ragged(column):
            raise TypeError(
                f"column {name} must be ragged ([B, j], jagged layout); got a {tuple(column.shape)} tensor. "
                "Convert it with tidemill_dataproto.ragged.from_padded(column, attention_mask), or pass all columns "
                "padded: input_ids and attention_mask [B, T], responses and other response columns [B, R]"
            )
        if column.dtype not in _INTEGERS or column.dim() != 2:
            raise TypeError(f"column {name} must be integer token ids, [B, j]; got {column.dtype}, {_shape(column)}")


def _check_response_columns(batch: DataProto, response_lengths: torch.Tensor) -> None:
    assert batch.batch is not None
    for name in _RESPONSE_COLUMNS:
        if name not in batch.batch.keys():  # noqa: SIM118 - a TensorDict
            continue
        column = batch[name]
        if ragged.is_ragged(column):
            _check_rows(
                ragged.lengths(column) != response_lengths,
                f"row {{row}} of {name} has {{a}} elements but its response has {{b}}; they must be equal",
                ragged.lengths(column),
                response_lengths,
            )
        elif name == "response_mask" or column.dim() > 1:  # [B] is one number per row
            raise ValueError(f"column {name} must be shaped like responses, ragged or padded; got {_shape(column)}")
    mask = batch["response_mask"]
    flat = ragged.values(mask)
    if flat.dim() != 1:
        raise ValueError(f"column response_mask must be shaped like responses, [B, j]; got {_shape(mask)}")
    bad = ~((flat >= 0) & torch.isfinite(flat))
    if bad.any():
        position = int(bad.nonzero()[0])
        raise ValueError(
            f"row {_row_of(position, response_lengths)} of response_mask contains {flat[position].item()}; it must be "
            "0 for a token that is not trained, and 1 or another positive weight for a token that is"
        )


def _shape(column: torch.Tensor) -> str:
    sizes = ["B", "j", *column.shape[2:]] if ragged.is_ragged(column) else column.shape
    return f"a tensor [{', '.join(map(str, sizes))}]"


def _check_rows(bad: torch.Tensor, message: str, a: torch.Tensor, b: torch.Tensor) -> None:
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(message.format(row=row, a=int(a[row]), b=int(b[row])))


def _check_lengths(lengths: torch.Tensor, rules: BatchRules) -> None:
    for limit, what in (
        (rules.limit.total, f"{rules.limit}; raise it or drop longer rows"),
        (
            rules.max_position_embeddings,
            f"the model's max_position_embeddings={rules.max_position_embeddings}; drop longer rows",
        ),
        (
            rules.max_unscaled,
            f"the {rules.max_unscaled} up to which the model's rotary embedding (longrope, dynamic) does not depend on "
            "other rows; drop longer rows, or for longrope set ModelConfig.attn_implementation to 'sdpa'",
        ),
    ):
        if limit is not None:
            _check_rows(lengths > limit, f"row {{row}} has {{a}} tokens, above {what}", lengths, lengths)


def _row_of(position: int, lengths: torch.Tensor) -> int:
    return int(torch.searchsorted(lengths.cumsum(0), position, right=True))


def _check_tokens(token_ids: torch.Tensor, lengths: torch.Tensor, vocab_size: int) -> None:
    bad = (token_ids < 0) | (token_ids >= vocab_size)
    if bad.any():
        position = int(bad.nonzero()[0])
        raise ValueError(
            f"row {_row_of(position, lengths)} of input_ids contains token id {int(token_ids[position])}, outside the "
            f"model's vocabulary of {vocab_size}; use the tokenizer of the model"
        )


def _check_tail(tokens: torch.Tensor, responses: torch.Tensor) -> None:
    response_lengths = ragged.lengths(responses)
    tail = ragged.values(tokens)[response_positions(ragged.lengths(tokens), response_lengths)]
    differs = tail != ragged.values(responses)
    if differs.any():
        row = _row_of(int(differs.nonzero()[0]), response_lengths)
        raise ValueError(f"row {row} of input_ids must end with its response, and does not; pass prompt + response")
