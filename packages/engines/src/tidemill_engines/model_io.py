"""Inputs and outputs of a model for one micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import torch.nn.functional as F


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedLayout:
    """Where the rows of a packed micro-batch lie; the same for all layers, so built once per micro-batch.

    Attributes:
        cu_seqlens: [B + 1] int32, the start of each row and the end of the last; no row is empty.
        max_length: tokens of the longest row.
        padded_index: [N] int64, where each token lies in a right-padded [B * max_length] layout.
    """

    cu_seqlens: torch.Tensor
    max_length: int
    padded_index: torch.Tensor

    @classmethod
    def from_lengths(cls, lengths: torch.Tensor, device: torch.device) -> "PackedLayout":
        """Builds the layout of rows of `lengths` ([B] int64 on the CPU, all positive)."""
        max_length = int(lengths.max())
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        row_shift = torch.arange(len(lengths)) * max_length - cu_seqlens[:-1]
        padded_index = torch.arange(int(cu_seqlens[-1])) + row_shift.repeat_interleave(lengths)
        return cls(
            cu_seqlens=cu_seqlens.to(device, torch.int32, non_blocking=True),
            max_length=max_length,
            padded_index=padded_index.to(device, non_blocking=True),
        )

    @property
    def num_rows(self) -> int:
        return len(self.cu_seqlens) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelInputs:
    """What the model is called with, on its device: N tokens of all rows, of which M are response tokens.

    Where several ranks share the rows, N and M are those of this rank's run of the packed tokens.

    Attributes:
        input_ids: [1, N] int64.
        position_ids: [1, N] int64, from 0 in each row. Of a vision-language model [4, 1, N]: these, then time, height
            and width.
        layout: where the rows lie, for all ranks that share them.
        predictors: [M] int64, the index in N of the token before each response token; logits are needed there only.
        labels: [M] int64, the response tokens.
        temperature: that the logits are divided by.
        first_output: which of the response tokens of all sharing ranks `labels` begins with.
        num_outputs: response tokens of all sharing ranks.
        vision: tensors of images and videos, by the names of the model's arguments.
        all_input_ids: [1, N * S] int64, of all S ranks that share the rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: PackedLayout
    predictors: torch.Tensor
    labels: torch.Tensor
    temperature: float
    first_output: int
    num_outputs: int
    vision: Mapping[str, torch.Tensor]
    all_input_ids: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisionInputs:
    """What a model of the Qwen-VL families is given for a micro-batch beside its tokens.

    Attributes:
        tensors: `pixel_values` [P, W] float and `image_grid_thw` [n, 3] int64 of all images, and likewise of videos, in
            the order of the rows; the names are those of the model's arguments.
        placeholders: tokens of one more row that nothing is predicted from, for images that stand for none.
        positions: [N, 3] int64, of all tokens and then of the placeholders.
    """

    tensors: dict[str, torch.Tensor]
    placeholders: list[int]
    positions: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """What a model says about the N response tokens of a micro-batch, row after row: tensors [N, ...], or None.

    Attributes:
        router_loss: [N] float32 with gradient, of a mixture of experts that is trained with
            `ModelConfig.router_aux_loss_coef`: what adds up over a row to its load-balancing loss; else None.
        router_logits: [N, L, E] with gradient, of a mixture of experts with `ModelConfig.output_router_logits`: what
            the router of each of L layers said about E experts, for the token before each response token (whose
            hidden state predicts it); else None.
    """

    router_loss: torch.Tensor | None = None
    router_logits: torch.Tensor | None = None

    def columns(self) -> dict[str, torch.Tensor]:
        """The fields that are there, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def detached(self) -> Self:
        """The same without gradient."""
        return replace(self, **{name: value.detach() for name, value in self.columns().items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutput(Outputs):
    """What the model says about the N response tokens of a micro-batch, row after row.

    Attributes:
        log_probs: [N] float32, log p(token | everything before it) at the batch's temperature, with gradient.
        entropy: [N] float32 of the predicting distributions, with gradient; None unless it was asked for.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueOutput(Outputs):
    """What a value model says about the N response tokens of a micro-batch, row after row.

    Attributes:
        values: [N] float32, the value of the state that each token is chosen in (everything before it), with gradient.
    """

    values: torch.Tensor
