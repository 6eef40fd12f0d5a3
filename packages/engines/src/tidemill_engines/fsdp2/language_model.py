"""The FSDP2 engine for causal language models: its step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tidemill_dataproto import DataProto

from tidemill_engines.attention.packed import max_unscaled
from tidemill_engines.attention.ulysses import gather_output
from tidemill_engines.batch.check import BatchRules, TokenLimit
from tidemill_engines.batch.micro_batches import BatchPlan, plan_batch
from tidemill_engines.batch.multi_modal import MODEL_TYPES, VisionRule
from tidemill_engines.batch.outputs import BatchOutput, StepOutput, collect, with_normalizer
from tidemill_engines.batch.packing import pack_rows
from tidemill_engines.fsdp2.backbone import expose_backbone, head_of, run_backbone, share_tokens
from tidemill_engines.fsdp2.engine import FSDP2Engine
from tidemill_engines.fsdp2.interrupted import reset_after_failure
from tidemill_engines.fsdp2.model import fsdp_modules
from tidemill_engines.head.log_probs import head_log_probs
from tidemill_engines.loss.contract import LossFn, MicroBatchLoss
from tidemill_engines.loss.metrics import Metric, as_metrics
from tidemill_engines.loss.router import connect_to_output, router_logits_of_outputs, router_losses, with_router_loss
from tidemill_engines.model_io import ModelInputs, ModelOutput, Outputs


class FSDP2LanguageModel(FSDP2Engine):
    """A Hugging Face causal language model, trained and evaluated on packed rows."""

    def _open(self) -> None:
        ranks_per_row = self.engine_config.ranks_per_row
        sizes = {
            "ulysses_sequence_parallel_size": ranks_per_row,
            "micro_batch_size_per_gpu": self.engine_config.micro_batch_size_per_gpu,
        }
        for name, size in sizes.items():
            if not self._packs_rows and size not in (None, 1):
                raise ValueError(
                    f"FSDP2Config.{name} > 1 requires ModelConfig.attn_implementation='varlen'; "
                    f"got {self.model_config.attn_implementation!r}"
                )
        self._balances_experts = self.model_config.router_aux_loss_coef > 0
        super()._open()
        self._check_experts()
        if ranks_per_row > 1:
            self.engine_config.check_heads(self.model.config.get_text_config().num_attention_heads)
        expose_backbone(self.model)
        self._vision = self._vision_rule()

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
        self.check_onloaded(*(["params"] if forward_only else ["params", "grads"]))
        if not forward_only:
            self.check_gradients()
        if loss_fn is not None and self._balances_experts:
            loss_fn = with_router_loss(loss_fn, self.model_config.router_aux_loss_coef)
        plan = plan_batch(
            batch,
            self.groups.control,
            BatchRules(
                vocab_size=int(self.model.config.get_text_config().vocab_size),
                limit=TokenLimit(
                    per_rank=self.engine_config.max_token_len_per_gpu,
                    ranks_per_row=self.engine_config.ranks_per_row,
                ),
                max_unscaled=max_unscaled(self.model.config, is_packed=self._packs_rows),
                vision=self._vision,
            ),
            data_parallel_rank=self.get_data_parallel_rank(),
            micro_batch_size=self.engine_config.micro_batch_size_per_gpu if self._packs_rows else 1,
            hidden_size=int(self.model.config.get_text_config().hidden_size),
            with_loss=loss_fn is not None,
        )
        self.meter.count(plan.micro_batches)

        try:
            steps = self._run(
                plan,
                loss_fn,
                forward_only=forward_only,
                calculate_entropy=calculate_entropy,
                keeps_outputs=forward_only or keeps_outputs,
            )
        except BaseException:
            self._has_failed |= not forward_only
            reset_after_failure(self.model)
            raise
        finally:
            for module in fsdp_modules(self.model):
                module.reshard()
        return collect(
            steps,
            plan,
            self.groups.control,
            data_parallel_rank=self.get_data_parallel_rank(),
            with_outputs=forward_only or keeps_outputs,
        )

    def _run(
        self,
        plan: BatchPlan,
        loss_fn: LossFn | None,
        *,
        forward_only: bool,
        calculate_entropy: bool,
        keeps_outputs: bool,
    ) -> list[StepOutput]:
        """Run the micro-batches in order."""
        loss, steps = with_normalizer(loss_fn, plan), []
        for number, micro_batch in enumerate(plan.micro_batches, start=1):
            self._set_gradient_sync(is_last=number == len(plan.micro_batches))
            steps.append(
                self.forward_step(micro_batch, loss, forward_only=forward_only, calculate_entropy=calculate_entropy)
            )
            if not keeps_outputs:
                steps[-1] = replace(steps[-1], model_output=Outputs())
        return steps

    def forward_step(
        self, micro_batch: DataProto, loss_fn: MicroBatchLoss | None, *, forward_only: bool, calculate_entropy: bool
    ) -> StepOutput:
        with self.meter.part("forward"):
            loss, metrics, output = self._forward(micro_batch, loss_fn, calculate_entropy=calculate_entropy)
        if loss is None:
            return StepOutput(loss=None, metrics={}, model_output=output)
        if not forward_only:
            if not loss.requires_grad:  # a constant loss; the backward must still enter the collectives
                loss = loss + sum(column.sum() for column in output.columns().values()) * 0.0
            with self.meter.part("backward"):
                loss.backward()
            output = output.detached()
        return StepOutput(loss=loss.detach(), metrics=as_metrics(metrics), model_output=output)

    def _forward(
        self, micro_batch: DataProto, loss_fn: MicroBatchLoss | None, *, calculate_entropy: bool
    ) -> tuple[torch.Tensor | None, Mapping[str, torch.Tensor | Metric], Outputs]:
        inputs = self.prepare_model_inputs(micro_batch)
        hidden_states, router_logits = self.run_model(inputs)
        output = self.prepare_model_outputs(hidden_states, inputs, calculate_entropy=calculate_entropy)
        sharing = self.groups.sequence_parallel
        if self.model_config.output_router_logits:
            output = replace(output, router_logits=router_logits_of_outputs(router_logits, inputs))
        if loss_fn is not None and self._balances_experts:
            top_k = self.model.config.get_text_config().num_experts_per_tok
            output = replace(output, router_loss=router_losses(router_logits, inputs, top_k, sharing))
        if sharing is not None:
            output = gather_output(output, inputs, sharing)
        if loss_fn is None:
            return None, {}, output
        loss, metrics = loss_fn(output, micro_batch.to(self.device, non_blocking=True))
        return loss, metrics, output

    def prepare_model_inputs(self, micro_batch: DataProto) -> ModelInputs:
        vision = None
        if self._vision is not None:
            vision = self._vision.prepare(micro_batch, micro_batch.meta_info.get("vision_kinds", ()))
        group = self.groups.sequence_parallel
        if group is None:
            return pack_rows(micro_batch, self.device, vision=vision)
        share, num_shares = dist.get_rank(group), dist.get_world_size(group)
        return pack_rows(micro_batch, self.device, share=share, num_shares=num_shares, vision=vision)

    def run_model(self, inputs: ModelInputs) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Run the model without its head, which `prepare_model_outputs` runs.

        Returns:
            The hidden states [M, H] at `inputs.predictors`, and the router logits [N, E] of each layer, if required.
        """
        wanted = {"output_router_logits": True} if self._needs_router_logits else {}
        packing: dict[str, Any] = {}
        if self._packs_rows:
            packing = {"tidemill_layout": inputs.layout, "tidemill_group": self.groups.sequence_parallel}
        output = run_backbone(
            self.model,
            input_ids=inputs.input_ids if self._vision is None else inputs.all_input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            **packing,
            **inputs.vision,
            **wanted,
        )
        hidden_states = output.last_hidden_state
        router_logits = connect_to_output(output.router_logits, hidden_states) if wanted else ()
        return hidden_states.squeeze(0).index_select(0, inputs.predictors), router_logits

    def prepare_model_outputs(
        self, hidden_states: torch.Tensor, inputs: ModelInputs, *, calculate_entropy: bool
    ) -> Outputs:
        out = head_log_probs(
            hidden_states,
            head_of(self.model),
            inputs.labels,
            temperature=inputs.temperature,
            entropy=calculate_entropy,
            top_k=inputs.topk.k,
            topk_ids=inputs.topk.ids,
        )
        return ModelOutput(**out._asdict())

    @property
    def _packs_rows(self) -> bool:
        """Whether a micro-batch may have several rows, which other attentions do not separate in all models."""
        return self.model_config.attn_implementation == "varlen"

    @property
    def _needs_router_logits(self) -> bool:
        return self._balances_experts or self.model_config.output_router_logits

    def _check_experts(self) -> None:
        has_experts = hasattr(self.model.config.get_text_config(), "num_experts_per_tok")
        backbone: Any = self.model.base_model
        records = "router_logits" in backbone.can_record_outputs
        if self._needs_router_logits and not (has_experts and records):
            option = "router_aux_loss_coef" if self._balances_experts else "output_router_logits"
            raise ValueError(
                f"ModelConfig.{option} requires a MoE model whose router logits transformers records; "
                f"{self.model.config.model_type} is not one. Leave the default"
            )

    def _vision_rule(self) -> VisionRule | None:
        """Return how images become tokens; None for a text-only model."""
        if self.model.config.model_type not in MODEL_TYPES:
            return None
        backbone: Any = self.model.base_model
        if self.groups.sequence_parallel is not None:
            share_tokens(backbone.language_model, self.groups.sequence_parallel)
        return VisionRule.of(self.model.config, backbone.get_rope_index)

    def _set_gradient_sync(self, *, is_last: bool) -> None:
        """Accumulate the gradients of all micro-batches and reduce them once, if that requires no more memory.

        This holds if weights stay gathered (then gradients do, too), or, if the reduction has the gradient's dtype, for
        ranks that hold whole weights, and for the reduction between replicas.
        """
        config, groups = self.engine_config, self.groups
        keeps_weights = not config.reshard_after_forward
        adds_alike = config.reduce_dtype == self.model_config.dtype and not config.offload_policy
        root = fsdp_modules(self.model)[0]
        if keeps_weights or (adds_alike and groups.mesh.size(-1) == 1):
            root.set_requires_gradient_sync(is_last)
        elif adds_alike and groups.num_replicas > 1:
            root.set_requires_all_reduce(is_last)
        if keeps_weights:
            root.set_reshard_after_backward(is_last)
            root.set_is_last_backward(is_last)
