"""Training of MoE models: balance loss, router replay, and the load of the experts."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.batch.micro_batches import restore_order
from tidemill_engines.batch.padded import is_padded, to_padded
from tidemill_engines.config import ModelConfig
from tidemill_engines.distributed.agreement import all_gather, raise_on_all_ranks
from tidemill_engines.distributed.device import to_device
from tidemill_engines.loss.contract import Normalizer
from tidemill_engines.loss.router import ROUTED_EXPERTS
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.batch.packed import Division, MegatronInputs, num_packed
from tidemill_engines.megatron.batch.routing import Routing
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_engines.megatron.parallel.groups import MegatronGroups
from tidemill_engines.megatron.parallel.stage_sums import StageSums


def check_moe(model: ModelConfig, config: MegatronConfig, architecture: Architecture, device: torch.device) -> None:
    """Raise ValueError for MoE settings that a dense model ignores, or that the model or gloo does not support."""
    if not architecture.num_experts:
        for name, is_set in (
            ("ModelConfig.router_aux_loss_coef", model.router_aux_loss_coef > 0),
            ("MegatronConfig.router_replay", config.router_replay),
        ):
            if is_set:
                raise ValueError(
                    f"{name} requires a MoE model, but {architecture.model_type} is dense; leave it at its default"
                )
    elif architecture.router is not None and model.router_aux_loss_coef > 0:
        raise ValueError(
            f"ModelConfig.router_aux_loss_coef must be 0 for a {architecture.model_type} model, got "
            f"{model.router_aux_loss_coef}: the bias of its router balances the experts, and is not trained here"
        )
    elif device.type == "cpu" and config.expert_tp > 1 and config.token_dispatcher(architecture) == "alltoall":
        raise ValueError(
            f"expert_tensor_parallel_size = {config.expert_tp} with moe_token_dispatcher_type='alltoall' gathers "
            "unequal numbers of tokens, which gloo does not support; on a CPU use "
            "moe_token_dispatcher_type='allgather' or expert_tensor_parallel_size=1"
        )


class MoEBatch:
    """Routing of the micro-batches of one batch, on one rank. Collective: every rank creates one.

    Args:
        micro_batches: micro-batches in the order in which they run.
        device: device of this rank.
        normalizer: normalizer of the loss; None without loss.
        coefficient: coefficient of the balance loss.
        replays: use the column `routed_experts` if there is one, and record the experts if there is no loss.
        dispatcher: collective that sends tokens to experts, "alltoall" or "allgather".
        num_chunks: model chunks of each pipeline stage.
        forward_only: True if there is no backward.

    Raises:
        ValueError: `routed_experts` does not fit the tokens or the model; raised on every rank.
    """

    def __init__(
        self,
        micro_batches: Sequence[DataProto],
        architecture: Architecture,
        groups: MegatronGroups,
        division: Division,
        device: torch.device,
        *,
        normalizer: Normalizer | None,
        coefficient: float,
        replays: bool,
        dispatcher: str,
        num_chunks: int,
        forward_only: bool,
    ) -> None:
        self._architecture = architecture
        self._groups = groups
        self._division = division
        self._device = device
        self._normalizer = normalizer
        self._coefficient = 0.0 if normalizer is None else coefficient
        self.keeps = replays and normalizer is None
        if dispatcher == "allgather":
            equalize(micro_batches, division, groups.control)
        self._micro_batches = {id(batch): number for number, batch in enumerate(micro_batches)}
        self._sums = [
            StageSums(groups.stages, number, num_chunks, for_last_only=forward_only)
            for number in range(len(micro_batches))
        ]
        self._routings: list[Routing | None] = [None] * len(micro_batches)
        self._num_tokens = [int(ragged.lengths(batch["input_ids"]).sum()) for batch in micro_batches]
        self._given: list[torch.Tensor | None] = [None] * len(micro_batches)
        if replays:
            with raise_on_all_ranks(groups.control):
                self._given = [self._read(batch) for batch in micro_batches]

    def _read(self, micro_batch: DataProto) -> torch.Tensor | None:
        """The given experts, int32 [N, L, K]; None where the routers choose."""
        if not _has_experts(micro_batch):
            return None
        a, column = self._architecture, micro_batch[ROUTED_EXPERTS]
        wanted = (a.num_hidden_layers, a.num_experts_per_tok)
        if not ragged.is_ragged(column) or tuple(column.shape[2:]) != wanted:
            got = f"{tuple(column.shape[2:])} per token" if ragged.is_ragged(column) else f"{tuple(column.shape)}"
            raise ValueError(
                f"{ROUTED_EXPERTS} must be ragged [B, j, {wanted[0]}, {wanted[1]}] (layers, experts per token); "
                f"got {got}"
            )
        if not torch.equal(ragged.lengths(column), ragged.lengths(micro_batch["input_ids"])):
            raise ValueError(
                f"{ROUTED_EXPERTS} must have one entry per token of input_ids; got rows of other lengths than input_ids"
            )
        given = ragged.values(column).int()
        checked = to_device(given, self._device)  # the one thread of the CPU takes 14 ms per million experts
        if len(given) and (int(checked.min()) < -1 or int(checked.max()) >= a.num_experts):
            raise ValueError(
                f"{ROUTED_EXPERTS} must be between 0 and {a.num_experts - 1}, or -1 where the router chooses; got "
                f"values from {int(given.min())} to {int(given.max())}"
            )
        if not _are_different(checked[:, a.num_dense_layers :]):
            raise ValueError(
                f"{ROUTED_EXPERTS} must have {a.num_experts_per_tok} different experts per token and layer, or only "
                "-1; got a token with repeated experts or with some -1"
            )
        return given

    def routing_of(self, micro_batch: DataProto, inputs: MegatronInputs) -> Routing:
        """Return the routing of a micro-batch, the same object for all chunks of the stage."""
        number = self._micro_batches[id(micro_batch)]
        routing = self._routings[number]
        if routing is None:
            tokens, device = inputs.tokens, inputs.tokens.device
            if self._division.sp_size > 1:
                tokens = tokens.chunk(self._division.sp_size)[dist.get_rank(self._groups.tp)]
            given = self._given[number]
            routing = self._routings[number] = Routing(
                tokens=tokens,
                lengths=to_device(ragged.lengths(micro_batch["input_ids"]), device),
                given=None if given is None else to_device(given, device),
                weights=self._weights(micro_batch, device) if self._coefficient else None,
                sharing=self._sharing(),
                sums=self._sums[number],
                num_layers=self._architecture.num_hidden_layers,
                counts=self._normalizer is not None,
            )
        return routing

    def _weights(self, micro_batch: DataProto, device: torch.device) -> torch.Tensor:
        """[B]: weight of each row's balance loss in the mean over the rows that are trained on."""
        assert self._normalizer is not None
        column = micro_batch["response_mask"]
        is_trained = ragged.segment_sum((ragged.values(column) != 0).float(), column) > 0
        return to_device(is_trained * (self._coefficient / self._normalizer.num_sequences), device)

    def _sharing(self) -> list[dist.ProcessGroup]:
        """Groups of ranks that have other tokens of the same rows."""
        groups = [(self._division.cp_size, self._groups.cp), (self._division.sp_size, self._groups.tp)]
        return [group for size, group in groups if size > 1]

    def losses(self, micro_batch: DataProto) -> torch.Tensor | None:
        """On the last stage, the balance loss as `ModelOutput.router_loss`, without gradient: the routers add it."""
        routing = self._routings[self._micro_batches[id(micro_batch)]]
        if routing is None or not routing.balances:
            return None
        counts = to_device(ragged.lengths(micro_batch["responses"]), routing.tokens.device)
        return (routing.losses() / counts.clamp(min=1)).repeat_interleave(counts)

    def finish(self) -> None:
        """Wait until all sums have been sent to the other stages."""
        for sums in self._sums:
            sums.finish()

    def load(self) -> dict[str, float]:
        """Return how evenly the global batch used the experts of each layer. Collective.

        Returns:
            "expert_load/max": tokens of the busiest expert of all layers, relative to an equal share; and
            "expert_load/idle": fraction of experts without tokens.
        """
        a = self._architecture
        counts = torch.zeros(a.num_hidden_layers, a.num_experts, dtype=torch.float64)
        for routing in self._routings:
            if routing is not None and routing.sent:
                sent = torch.stack([of_rows.sum(0) for of_rows in routing.sent.values()])
                counts[list(routing.sent)] += sent.double().cpu()
        dist.all_reduce(counts, group=self._groups.control)
        counts = counts[a.num_dense_layers :]
        even = counts.mean(-1, keepdim=True).clamp(min=1.0)
        return {
            "expert_load/max": (counts / even).max().item(),
            "expert_load/idle": (counts == 0).double().mean().item(),
        }

    def chosen(self, batch: DataProto, indices: list[list[int]]) -> torch.Tensor:
        """Return the experts of all tokens, int32, [B, j, L, K], ragged or padded like `batch`. Collective."""
        parts = [self._chosen(number) for number in range(len(self._routings))]
        batch = batch.to("cpu")
        if not is_padded(batch):
            return restore_order(parts, indices, batch["input_ids"])
        mask = batch["attention_mask"]
        return to_padded(restore_order(parts, indices, ragged.from_padded(batch["input_ids"], mask)), mask)

    def _chosen(self, number: int) -> torch.Tensor:
        a, routing = self._architecture, self._routings[number]
        assert routing is not None
        is_token = routing.tokens >= 0
        shape = (self._num_tokens[number], a.num_hidden_layers, a.num_experts_per_tok)
        found = torch.zeros(shape, dtype=torch.int32, device=is_token.device)
        for layer, experts in routing.chosen.items():
            found[routing.tokens[is_token], layer] = experts[is_token].int()
        for group in self._sharing():
            dist.all_reduce(found, group=group)
        found = found.cpu()
        dist.all_reduce(found, group=self._groups.stages)
        return found


def equalize(micro_batches: Sequence[DataProto], division: Division, group: dist.ProcessGroup) -> None:
    """Pad each micro-batch to equally many tokens on all ranks, which the all-gather of tokens requires. Collective."""
    sizes_by_rank = all_gather([num_packed(batch, division) for batch in micro_batches], group)
    for batch, *sizes in zip(micro_batches, *sizes_by_rank, strict=True):
        batch.meta_info["packed_tokens"] = max(sizes)


def _has_experts(batch: DataProto) -> bool:
    return batch.batch is not None and ROUTED_EXPERTS in batch.batch.keys()  # noqa: SIM118 - a TensorDict


def _are_different(given: torch.Tensor) -> bool:
    """Whether the experts [..., K] of each token are all different, or all -1."""
    is_given = given >= 0
    if not torch.equal(is_given.all(-1), is_given.any(-1)):
        return False
    pairs = (
        (given[..., k:] == given[..., : given.shape[-1] - k]) & is_given[..., k:] for k in range(1, given.shape[-1])
    )
    return not any(bool(pair.any()) for pair in pairs)
