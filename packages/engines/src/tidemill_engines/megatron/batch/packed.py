"""Rows of a micro-batch as Megatron's model takes them: packed, and split over context-parallel ranks."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.batch.packing import response_positions
from tidemill_engines.batch.topk_request import topk_request
from tidemill_engines.distributed.device import to_device
from tidemill_engines.megatron.batch.routing import Routing
from tidemill_engines.megatron.parallel.context_parallel import PartLayout, own_tokens
from tidemill_engines.model_io import PackedLayout, TopKRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How the tokens of a micro-batch are split over ranks.

    Attributes:
        cp_rank, cp_size: rank and size of context parallelism; each rank has two chunks of each sequence.
        sp_size: number of ranks over which sequence parallelism splits the tokens of a context-parallel rank.
    """

    cp_rank: int = 0
    cp_size: int = 1
    sp_size: int = 1

    @property
    def sequence_multiple(self) -> int:
        """Number by which the padded length of a sequence is divisible."""
        return 1 if self.cp_size == 1 else 2 * self.cp_size

    @property
    def pack_multiple(self) -> int:
        """Number by which the number of all tokens is divisible."""
        return self.sequence_multiple * self.sp_size

    def padded(self, lengths: torch.Tensor) -> torch.Tensor:
        """Lengths of sequences after padding to `sequence_multiple`."""
        return (lengths + self.sequence_multiple - 1) // self.sequence_multiple * self.sequence_multiple


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's parameters of packed rows, with those of this engine's attention and routers.

    Attributes:
        layout: positions of the rows, or with context parallelism of this rank's parts of them.
        rotary: cosine and sine [n, 1, D / 2] of the rotary angles of queries and keys; None if the model applies them
            before attention.
        routing: routing of the tokens; None for dense models.
    """

    layout: PackedLayout | PartLayout | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    routing: Routing | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MegatronInputs:
    """Inputs of the model, on its device: n tokens of this rank, of which m predict a response token.

    Attributes:
        input_ids, position_ids: [1, n] int64.
        packed: positions of the sequences, including padding.
        tokens: [n] int64, index in the micro-batch of each token; -1 for padding.
        predictors: [m] int64, indices in n of the tokens that predict a response token.
        outputs: [m] int64, indices of the predicted tokens among the response tokens of the micro-batch.
        labels: [m] int64, the predicted tokens.
        topk: requested log-probabilities of k ids for each of `labels`.
        num_outputs: number of response tokens of the micro-batch.
        temperature: divisor of the logits.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    packed: PackedRows
    tokens: torch.Tensor
    predictors: torch.Tensor
    outputs: torch.Tensor
    labels: torch.Tensor
    topk: TopKRequest
    num_outputs: int
    temperature: float


def num_packed(micro_batch: DataProto, division: Division) -> int:
    """Smallest number of tokens of a packed micro-batch, with padding, on all context-parallel ranks together."""
    num_tokens, multiple = int(division.padded(ragged.lengths(micro_batch["input_ids"])).sum()), division.pack_multiple
    return -(-max(num_tokens, 1) // multiple) * multiple


def pack_rows(micro_batch: DataProto, device: torch.device, division: Division) -> MegatronInputs:
    """Pack the columns `input_ids` and `responses` of a checked batch, which is on the CPU.

    Each row is padded to `Division.sequence_multiple`. A row of padding is added to reach `Division.pack_multiple`, or
    `meta_info["packed_tokens"]` tokens. A rank without tokens gets only padding, because it takes part in every
    collective. Padding predicts nothing, and rows do not attend to each other.
    """
    tokens, responses = micro_batch["input_ids"], micro_batch["responses"]
    lengths = ragged.lengths(tokens)
    padded = division.padded(lengths)
    num_tokens = max(num_packed(micro_batch, division), micro_batch.meta_info.get("packed_tokens", 0))
    padded = torch.cat([padded, (num_tokens - padded.sum()).reshape(1)])
    padded = padded[padded > 0]
    starts = F.pad(padded.cumsum(0), (1, 0))
    # Index of each token among the padded ones. Empty rows have no tokens and are not among the padded rows.
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
        return to_device(tensor, device)

    return MegatronInputs(
        input_ids=move(input_ids[own].unsqueeze(0)),
        position_ids=move(positions[own].unsqueeze(0)),
        packed=_packed(padded, move(starts.int()), division),
        tokens=move(token_of[own]),
        predictors=move(predictors[outputs]),
        outputs=move(outputs),
        labels=move(ragged.values(tokens).long()[targets][outputs]),
        topk=topk_request(micro_batch, outputs, device),
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
