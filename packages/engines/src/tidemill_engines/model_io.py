"""Inputs and outputs of a model for one micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import torch.nn.functional as F

from tidemill_engines.distributed.device import to_device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedLayout:
    """Positions of the rows of a packed micro-batch. All layers share it.

    Attributes:
        cu_seqlens: [B + 1] int32, start of each row, then the end of the last; no row is empty.
        max_length: number of tokens of the longest row.
        padded_index: [N] int64, index of each token in a right-padded [B * max_length] layout.
    """

    cu_seqlens: torch.Tensor
    max_length: int
    padded_index: torch.Tensor

    @classmethod
    def from_lengths(cls, lengths: torch.Tensor, device: torch.device) -> "PackedLayout":
        """Build the layout of rows with `lengths` ([B] int64 on the CPU, all positive)."""
        max_length = int(lengths.max())
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        row_shift = torch.arange(len(lengths)) * max_length - cu_seqlens[:-1]
        padded_index = torch.arange(int(cu_seqlens[-1])) + row_shift.repeat_interleave(lengths)
        return cls(
            cu_seqlens=to_device(cu_seqlens.int(), device),
            max_length=max_length,
            padded_index=to_device(padded_index, device),
        )

    @property
    def num_rows(self) -> int:
        return len(self.cu_seqlens) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopKRequest:
    """The k ids for each of M predicted tokens whose log-probabilities are requested; without both fields none.

    Attributes:
        k: number of most probable ids.
        ids: [M, k] integers, given ids.
    """

    k: int | None = None
    ids: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelInputs:
    """Inputs of the model for one micro-batch, on its device: N packed tokens, of which M are response tokens.

    If several ranks share the rows, N and M count this rank's part of the packed tokens.

    Attributes:
        input_ids: [1, N] int64.
        position_ids: [1, N] int64, from 0 in each row. For vision-language models [4, 1, N]: these, then time, height
            and width.
        layout: positions of the rows in the packed tokens of all sharing ranks.
        predictors: [M] int64, index in N of the token before each response token; only these tokens need logits.
        labels: [M] int64, the response tokens.
        topk: requested log-probabilities of k ids for each of `labels`.
        temperature: divisor of the logits.
        first_output: index of the first of `labels` among the response tokens of all sharing ranks.
        num_outputs: number of response tokens of all sharing ranks.
        vision: tensors of images and videos, by argument name of the model.
        all_input_ids: [1, N * S] int64, tokens of all S sharing ranks.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: PackedLayout
    predictors: torch.Tensor
    labels: torch.Tensor
    topk: TopKRequest
    temperature: float
    first_output: int
    num_outputs: int
    vision: Mapping[str, torch.Tensor]
    all_input_ids: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisionInputs:
    """Images and videos of a micro-batch, for models of the Qwen-VL families.

    Attributes:
        tensors: `pixel_values` [P, W] float and `image_grid_thw` [n, 3] int64 of all images, and the same of videos, in
            row order, by argument name of the model.
        placeholders: tokens of one additional row without predictions, for placeholder images.
        positions: [N, 3] int64, positions of all tokens, then of the placeholders.
    """

    tensors: dict[str, torch.Tensor]
    placeholders: list[int]
    positions: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Outputs of a model for the N response tokens of a micro-batch, in row order: tensors [N, ...], or None.

    Attributes:
        router_loss: [N] float32 with gradient; its sum over a row is the load-balancing loss of the row. Only for MoE
            models in training with `ModelConfig.router_aux_loss_coef`.
        router_logits: [N, L, E] with gradient: logits of the routers of L layers for E experts, at the token before
            each response token (the token that predicts it). Only with `ModelConfig.output_router_logits`.
    """

    router_loss: torch.Tensor | None = None
    router_logits: torch.Tensor | None = None

    def columns(self) -> dict[str, torch.Tensor]:
        """Return the fields that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def detached(self) -> Self:
        """Return the same outputs without gradient."""
        return replace(self, **{name: value.detach() for name, value in self.columns().items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutput(Outputs):
    """Outputs of a language model for the N response tokens of a micro-batch, in row order.

    Attributes:
        log_probs: [N] float32 with gradient, log p(token | prefix) at the batch's temperature.
        entropy: [N] float32 with gradient, entropy of the distribution of each token; None unless requested.
        topk_ids: [N, k] int32, k ids for each token: those of the column `topk_ids`, or the most probable ones in
            descending order; None without both.
        topk_log_probs: [N, k] float32 with gradient, log p(id | prefix) of `topk_ids`.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_log_probs: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueOutput(Outputs):
    """Outputs of a value model for the N response tokens of a micro-batch, in row order.

    Attributes:
        values: [N] float32 with gradient, value of the state before each token.
    """

    values: torch.Tensor
