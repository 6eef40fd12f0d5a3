"""The rows of a micro-batch as Megatron takes them: packed, divided among context-parallel ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.batch.packing import response_positions
from tidemill_engines.megatron.parallel.context_parallel import PartLayout, own_tokens
from tidemill_engines.model_io import PackedLayout

if TYPE_CHECKING:
    from tidemill_engines.megatron.moe.router import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How tokens are divided among ranks.

    Attributes:
        cp_rank, cp_size: of context parallelism: each rank has two chunks of each sequence.
        sp_size: ranks among which sequence parallelism divides what a context-parallel rank has.
    """

    cp_rank: int = 0
    cp_size: int = 1
    sp_size: int = 1

    @property
    def sequence_multiple(self) -> int:
        """What the length of a sequence has to be a multiple of."""
        return 1 if self.cp_size == 1 else 2 * self.cp_size

    @property
    def pack_multiple(self) -> int:
        """What the number of all tokens has to be a multiple of."""
        return self.sequence_multiple * self.sp_size

    def padded(self, lengths: torch.Tensor) -> torch.Tensor:
        """The lengths of sequences, padded so that they can be divided."""
        return (lengths + self.sequence_multiple - 1) // self.sequence_multiple * self.sequence_multiple


@dataclass
class PackedRows(PackedSeqParams):
    """What Megatron knows of packed rows, and what attention needs to know of this rank's tokens.

    Attributes:
        layout: where the rows lie, or with context parallelism, where this rank's parts of them do.
        rotary: cosine and sine [n, 1, D / 2] of the angles that queries and keys are turned by.
        routing: what the routers of a mixture of experts do with the tokens; None of other models.
    """

    layout: PackedLayout | PartLayout | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    routing: "Routing | None" = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MegatronInputs:
    """What the model is called with, on its device: n tokens of this rank, of which m predict a response token.

    Attributes:
        input_ids, position_ids: [1, n] int64.
        packed: where the sequences lie, padding included.
        tokens: [n] int64, which token of the micro-batch each is; -1 for padding.
        predictors: [m] int64, indices in n.
        outputs: [m] int64, which of the response tokens of the micro-batch they predict.
        labels: [m] int64, these tokens.
        num_outputs: response tokens of the micro-batch.
        temperature: that the logits are divided by.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    packed: PackedRows
    tokens: torch.Tensor
    predictors: torch.Tensor
    outputs: torch.Tensor
    labels: torch.Tensor
    num_outputs: int
    temperature: float


def num_packed(micro_batch: DataProto, division: Division) -> int:
    """How many tokens a micro-batch has at least when it is packed, padding included, on all context-parallel ranks."""
    num_tokens, multiple = int(division.padded(ragged.lengths(micro_batch["input_ids"])).sum()), division.pack_multiple
    return -(-max(num_tokens, 1) // multiple) * multiple


def pack_rows(micro_batch: DataProto, device: torch.device, division: Division) -> MegatronInputs:
    """Packs the columns `input_ids` and `responses` of a checked batch (on the CPU).

    Each row is padded so that it can be divided, and a row of padding is added so that the whole can be, or has as many
    tokens as `meta_info["packed_tokens"]` says, or where there is no token at all: its rank still runs the model and
    takes part in every collective. Nothing is predicted from padding, and rows do not see each other.
    """
    tokens, responses = micro_batch["input_ids"], micro_batch["responses"]
    lengths = ragged.lengths(tokens)
    padded = division.padded(lengths)
    num_tokens = max(num_packed(micro_batch, division), micro_batch.meta_info.get("packed_tokens", 0))
    padded = torch.cat([padded, (num_tokens - padded.sum()).reshape(1)])
    padded = padded[padded > 0]
    starts = F.pad(padded.cumsum(0), (1, 0))
    # Where each token lies among the padded ones; empty rows have none, and are not among the padded rows.
    shift = starts[: int((lengths > 0).sum())] - F.pad(lengths[lengths > 0].cumsum(0), (1, 0))[:-1]
    at = torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths[lengths > 0])
    input_ids = torch.zeros(int(starts[-1]), dtype=torch.int64)
    input_ids[at] = ragged.values(tokens).long()
    own = own_tokens(padded.tolist(), division.cp_size, division.cp_rank)
    positions = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(padded)
    token_of = torch.full_like(input_ids, -1)
    token_of[at] = torch.arange(len(at))
    targets = response_positions(lengths, ragged.lengths(responses))
    here = torch.full_like(input_ids, -1)
    here[own] = torch.arange(len(own))
    predictors = here[at[targets - 1]]
    outputs = (predictors >= 0).nonzero().flatten()

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return MegatronInputs(
        input_ids=move(input_ids[own].unsqueeze(0)),
        position_ids=move(positions[own].unsqueeze(0)),
        packed=_packed(padded, move(starts.int()), division),
        tokens=move(token_of[own]),
        predictors=move(predictors[outputs]),
        outputs=move(outputs),
        labels=move(ragged.values(tokens).long()[targets][outputs]),
        num_outputs=len(targets),
        temperature=float(micro_batch.meta_info.get("temperature", 1.0)),
    )


def _packed(lengths: torch.Tensor, cu_seqlens: torch.Tensor, division: Division) -> PackedRows:
    longest, device = int(lengths.max()), cu_seqlens.device
    if division.cp_size == 1:
        layout = PackedLayout.from_lengths(lengths, device)
    else:
        layout = PartLayout.from_lengths(lengths.tolist(), division.cp_size, division.cp_rank, device)
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        layout=layout,
    )
