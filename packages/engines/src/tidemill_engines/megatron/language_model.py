"""The Megatron engine for causal language models: its step."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from tidemill_dataproto import DataProto

from tidemill_engines.attention.ulysses import gather_parts
from tidemill_engines.batch.check import BatchRules, TokenLimit
from tidemill_engines.batch.micro_batches import BatchPlan, plan_batch
from tidemill_engines.batch.outputs import BatchOutput, StepOutput, collect, with_normalizer
from tidemill_engines.distributed.agreement import raise_any_error
from tidemill_engines.head.log_probs import Head, head_log_probs
from tidemill_engines.loss.contract import LossFn, MicroBatchLoss
from tidemill_engines.loss.metrics import as_metrics
from tidemill_engines.loss.router import ROUTED_EXPERTS, with_router_loss
from tidemill_engines.megatron.batch.packed import MegatronInputs, pack_rows
from tidemill_engines.megatron.batch.pipeline import run_schedule
from tidemill_engines.megatron.engine import MegatronEngine
from tidemill_engines.megatron.moe.batch import MoEBatch, equalize
from tidemill_engines.model_io import ModelOutput, Outputs


class MegatronLanguageModel(MegatronEngine):
    """A causal language model, trained and evaluated on packed rows with all of Megatron's parallelisms."""

    def forward_backward_batch(
        self,
        batch: DataProto,
        loss_fn: LossFn | None,
        *,
        forward_only: bool = False,
        calculate_entropy: bool = False,
        keeps_outputs: bool = False,
    ) -> BatchOutput:
        self.check_request(loss_fn, forward_only=forward_only, calculate_entropy=calculate_entropy)
        parallel = self.engine_config
        plan = plan_batch(
            batch,
            self.groups.control,
            BatchRules(
                vocab_size=self.architecture.vocab_size,
                limit=TokenLimit(
                    per_rank=self.engine_config.max_token_len_per_gpu, ranks_per_row=parallel.context_parallel_size
                ),
                max_position_embeddings=self.architecture.max_position_embeddings,
                replays=self.engine_config.router_replay,
            ),
            data_parallel_rank=self.get_data_parallel_rank(),
            micro_batch_size=self.engine_config.micro_batch_size_per_gpu,
            hidden_size=self.architecture.hidden_size,
            # The interleaved schedule requires a multiple of the number of stages.
            multiple_of=1
            if parallel.virtual_pipeline_model_parallel_size is None
            else parallel.pipeline_model_parallel_size,
            with_loss=loss_fn is not None,
        )
        self.check_onloaded("params", *([] if forward_only else ["grads"]))
        self.meter.count(plan.micro_batches)
        moe = self._moe_batch(plan, forward_only=forward_only)
        if loss_fn is not None and self.model_config.router_aux_loss_coef > 0:
            loss_fn = with_router_loss(loss_fn, self.model_config.router_aux_loss_coef)
        loss = None if loss_fn is None else with_normalizer(loss_fn, plan)
        steps = self._run(
            plan.micro_batches,
            loss,
            forward_only=forward_only,
            calculate_entropy=calculate_entropy,
            keeps_outputs=forward_only or keeps_outputs,
            moe=moe,
        )
        part, keeps = self.get_data_parallel_rank(), forward_only or keeps_outputs
        output = self.groups.from_last_stage(
            lambda group: collect(steps, plan, group, data_parallel_rank=part, with_outputs=keeps)
        )
        if moe is None:
            return output
        if moe.keeps:
            return replace(output, columns={**output.columns, ROUTED_EXPERTS: moe.chosen(batch, plan.indices)})
        return output if loss_fn is None else replace(output, metrics={**output.metrics, **moe.load()})

    def _moe_batch(self, plan: BatchPlan, *, forward_only: bool) -> MoEBatch | None:
        if not self.architecture.num_experts:
            return None
        return MoEBatch(
            plan.micro_batches,
            self.architecture,
            self.groups,
            self.division,
            self.device,
            normalizer=plan.normalizer,
            coefficient=self.model_config.router_aux_loss_coef,
            replays=self.engine_config.router_replay,
            dispatcher=self.engine_config.token_dispatcher(self.architecture),
            num_chunks=len(self.chunks),
            forward_only=forward_only,
        )

    def forward_step(
        self, micro_batch: DataProto, loss_fn: MicroBatchLoss | None, *, forward_only: bool, calculate_entropy: bool
    ) -> StepOutput:
        """Run one micro-batch through all stages. Only the last stage has a loss and outputs.

        Without the balance loss and router replay of MoE models, which belong to a whole batch.
        """
        if self.engine_config.token_dispatcher(self.architecture) == "allgather":
            equalize([micro_batch], self.division, self.groups.control)
        steps = self._run(
            [micro_batch],
            loss_fn,
            forward_only=forward_only,
            calculate_entropy=calculate_entropy,
            keeps_outputs=True,
        )
        return steps[0] if steps else StepOutput(loss=None, metrics={}, model_output=Outputs())

    def prepare_model_inputs(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, micro_batch: DataProto
    ) -> MegatronInputs:
        inputs = pack_rows(micro_batch, self.device, self.division)
        rotary = self.architecture.rotary
        if rotary is not None:  # else Megatron's attention computes it
            inputs.packed.rotary = rotary.cos_sin(inputs.position_ids, getattr(torch, self.engine_config.param_dtype))
        return inputs

    def prepare_model_outputs(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: torch.Tensor, inputs: MegatronInputs, *, calculate_entropy: bool
    ) -> Outputs:
        """Compute log-probabilities and entropy from the hidden states [n, H] of this context-parallel rank."""
        weight, first = self.head()
        out = head_log_probs(
            hidden_states.index_select(0, inputs.predictors),
            Head(weight=weight, first_id=first),
            inputs.labels,
            temperature=inputs.temperature,
            entropy=calculate_entropy,
            top_k=inputs.topk.k,
            topk_ids=inputs.topk.ids,
            group=self.groups.tp if self.engine_config.tensor_model_parallel_size > 1 else None,
        )
        output = ModelOutput(**out._asdict())
        return replace(output, **{name: self.of_all_tokens(own, inputs) for name, own in output.columns().items()})

    def gather_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """All-gather the last stage's hidden states, which sequence parallelism divides among ranks.

        The backward pass sums the gradients of the parts of the head.
        """
        if self.engine_config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_states)
        return copy_to_tensor_model_parallel_region(hidden_states)

    def of_all_tokens(self, own: torch.Tensor, inputs: MegatronInputs) -> torch.Tensor:
        """All-gather the outputs [M] of all response tokens from those [m] of this context-parallel rank."""
        if self.division.cp_size == 1:
            return own
        return gather_parts(own, inputs.outputs, inputs.num_outputs, self.groups.cp)

    def _run(
        self,
        micro_batches: list[DataProto],
        loss_fn: MicroBatchLoss | None,
        *,
        forward_only: bool,
        calculate_entropy: bool,
        keeps_outputs: bool,
        moe: MoEBatch | None = None,
    ) -> list[StepOutput]:
        """Run the schedule, then raise an error of the loss on all ranks; raised earlier, stages would wait for it."""
        errors: list[Exception] = []

        def finish(
            micro_batch: DataProto, inputs: MegatronInputs, hidden_states: torch.Tensor
        ) -> tuple[torch.Tensor, StepOutput]:
            hidden_states = self.gather_hidden_states(hidden_states)
            output = self.prepare_model_outputs(hidden_states.squeeze(1), inputs, calculate_entropy=calculate_entropy)
            router_loss = None if moe is None else moe.losses(micro_batch)
            if router_loss is not None:
                output = replace(output, router_loss=router_loss)
            if loss_fn is None:
                return hidden_states.new_zeros(()), StepOutput(loss=None, metrics={}, model_output=output)
            try:
                loss, reported = loss_fn(output, micro_batch.to(self.device, non_blocking=True))
                metrics = as_metrics(reported)
            except Exception as error:  # noqa: BLE001 - raised below, when no rank waits for this one
                errors.append(error)
                loss, metrics = hidden_states.new_zeros(()), {}
            # The backward must enter all collectives, whatever the loss depends on.
            loss = loss + sum(column.sum() for column in output.columns().values()) * 0.0
            kept = output.detached() if keeps_outputs else Outputs()
            return loss, StepOutput(loss=loss.detach(), metrics=metrics, model_output=kept)

        def prepare(micro_batch: DataProto) -> MegatronInputs:
            inputs = self.prepare_model_inputs(micro_batch)
            if moe is not None:
                inputs.packed.routing = moe.routing_of(micro_batch, inputs)
            return inputs

        with self.meter.part("forward_backward"), nullcontext() if forward_only else self._gradients.backward():
            steps = run_schedule(self.chunks, micro_batches, prepare, finish, forward_only=forward_only)
            if moe is not None:
                moe.finish()
            if loss_fn is not None:
                raise_any_error(errors[0] if errors else None, self.groups.control)
        return steps
