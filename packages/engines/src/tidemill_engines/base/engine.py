"""The interface of a training engine, and its training step."""

import logging
import math
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from tidemill_dataproto import DataProto

from tidemill_engines.base.lifecycle import ConfigT
from tidemill_engines.base.persistence import EnginePersistence
from tidemill_engines.batch.outputs import BatchOutput, StepOutput
from tidemill_engines.batch.topk_request import NUM_MOST_PROBABLE
from tidemill_engines.config import OptimizerConfig
from tidemill_engines.distributed.agreement import all_gather
from tidemill_engines.loss.contract import LossFn, MicroBatchLoss
from tidemill_engines.model_io import ModelInputs, Outputs
from tidemill_engines.optimizer import learning_rate

_log = logging.getLogger(__name__)
_OWN_METRICS = ("loss", "grad_norm", "grad_nonfinite", "lr")


class BaseEngine(EnginePersistence[ConfigT]):
    """A model that a group of ranks trains and evaluates. Every rank calls the same methods in the same order.

    A method with a batch takes the rows of this rank's `get_data_parallel_rank()`; ranks with the same data-parallel
    rank take the same rows. The batch has the ragged columns `input_ids` (prompt, then response) and `responses`, and
    optionally `meta_info["temperature"]` (default 1.0). A padded batch is supported too: `input_ids` and
    `attention_mask` [B, T], with `responses` [B, R] and the other response columns aligned with the last R tokens; its
    outputs are [B, R], 0 in padding.

    A backend implements the abstract methods. Methods with a leading underscore are its hooks in the steps here.

    Attributes:
        config_class: type of the engine configuration.
        has_entropy: whether the model predicts a distribution over tokens.
        device: device of the model.
        step: number of calls of `lr_scheduler_step`; the position in the learning-rate schedule.
        skipped_steps: number of optimizer steps that were skipped because the gradient was not finite.
        meter: measurement of the last `train_batch`.
    """

    has_entropy = True

    def train_batch(self, batch: DataProto, loss_fn: LossFn, *, calculate_entropy: bool = False) -> dict[str, float]:
        """Run one optimizer step: zero_grad, forward and backward, clip, step, schedule. Collective.

        Args:
            batch: batch with the additional ragged column `response_mask`.
            loss_fn: loss of a micro-batch, see `LossFn`.
            calculate_entropy: compute `ModelOutput.entropy` for the loss.

        Returns:
            The metrics of the loss over the global batch, "loss", "grad_norm" (before clipping), "grad_nonfinite" (1.0
            if the gradient was not finite and the step was skipped, else 0.0) and "lr" (of this step). The same on
            every rank.

        Raises:
            ValueError, TypeError: an invalid batch; raised on every rank.
            RuntimeError: the engine has no optimizer.
        """
        return self._train(batch, loss_fn, calculate_entropy=calculate_entropy, keeps_outputs=False).metrics

    def train_batch_with_outputs(
        self, batch: DataProto, loss_fn: LossFn, *, calculate_entropy: bool = False
    ) -> tuple[dict[str, float], DataProto]:
        """Run `train_batch`, and return what the model has computed for the loss, before the step. Collective.

        Returns:
            The metrics of `train_batch`, and the columns of `infer_batch` (without `routed_experts`), here of a forward
            pass in `train_mode`.
        """
        output = self._train(batch, loss_fn, calculate_entropy=calculate_entropy, keeps_outputs=True)
        return output.metrics, DataProto.from_dict(tensors=dict(output.columns))

    def _train(self, batch: DataProto, loss_fn: LossFn, *, calculate_entropy: bool, keeps_outputs: bool) -> BatchOutput:
        self.check_trains()
        with self.meter.step(), self.train_mode():
            self._offloader.prefetch("optimizer")
            self.optimizer_zero_grad()
            output = self.forward_backward_batch(
                batch, loss_fn, calculate_entropy=calculate_entropy, keeps_outputs=keeps_outputs
            )
            metrics = output.metrics
            taken = sorted(set(_OWN_METRICS[1:]) & metrics.keys())
            if taken:
                raise ValueError(f"the loss reports metrics under the engine's own names {taken}; rename them")
            grad_norm = self.optimizer_step()
            lr = self.lr_scheduler_step()
            self.optimizer_zero_grad()
        own = {"grad_norm": grad_norm, "grad_nonfinite": float(not math.isfinite(grad_norm)), "lr": lr}
        return replace(output, metrics=metrics | own)

    def infer_batch(self, batch: DataProto, *, entropy: bool = False, top_k: int | None = None) -> DataProto:
        """Compute the log-probabilities of the response tokens (or their values) without gradients. Collective.

        Args:
            top_k: number of most probable token ids to return for each response token.

        Returns:
            A batch with the rows of `batch` in their order and the float32 columns `log_probs` and, if requested,
            `entropy`; for a value model `values`. Ragged like `responses`, on the CPU. With `top_k`, also the ids
            `topk_ids` int32 [B, j, k], in descending order, and their log-probabilities `topk_log_probs` float32
            [B, j, k]. If the batch has a column `topk_ids`, the log-probabilities of these ids.

        Raises:
            ValueError, TypeError: an invalid batch, or `top_k` is not between 1 and the size of the vocabulary; raised
                on every rank. Or the most probable tokens of a value model.
        """
        if top_k is not None:
            if not self.has_entropy:
                raise ValueError("a value model predicts no tokens; call infer_batch(batch) without top_k")
            batch = batch[:]
            batch.meta_info[NUM_MOST_PROBABLE] = top_k
        with self.eval_mode():
            out = self.forward_backward_batch(batch, None, forward_only=True, calculate_entropy=entropy)
        return DataProto.from_dict(tensors=dict(out.columns))

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which `infer_batch` uses the base model without its adapters, as in peft.

        All ranks enter it. The base is the reference of a policy that trains adapters, without a copy of the weights.
        Only inference changes: exports and checkpoints contain the adapters all the same, and training is an error.

        Raises:
            ValueError: the engine trains no adapter.
        """
        raise ValueError(f"{type(self).__name__} trains no adapter; create a second engine for the reference")

    @abstractmethod
    def forward_backward_batch(
        self,
        batch: DataProto,
        loss_fn: LossFn | None,
        *,
        forward_only: bool = False,
        calculate_entropy: bool = False,
        keeps_outputs: bool = False,
    ) -> BatchOutput:
        """Run a batch in micro-batches and, unless `forward_only`, accumulate the gradient. Collective.

        After a backward pass, the outputs of the model are returned only with `keeps_outputs`.

        Gradients accumulate over several batches until `optimizer_zero_grad`. Megatron reduces them over the ranks at
        the first norm or step (with `overlap_grad_reduce` at the end of the first batch) and accepts no batch after it.

        Raises:
            ValueError, TypeError: an invalid batch; raised on every rank.
            RuntimeError: a backward pass without an optimizer, after one that has failed, or after Megatron has reduced
                the gradients.
        """

    def check_trains(self) -> None:
        """Raise RuntimeError if the engine has no optimizer."""
        if self.optimizer_config is None:
            raise RuntimeError("this engine has no optimizer; create it with an OptimizerConfig to train")

    def check_request(self, loss_fn: LossFn | None, *, forward_only: bool, calculate_entropy: bool) -> None:
        """Check the arguments of `forward_backward_batch`.

        Raises:
            ValueError: a backward pass without a loss, or the entropy of a value model.
            RuntimeError: a backward pass without an optimizer.
        """
        if not forward_only:
            if loss_fn is None:
                raise ValueError("a backward pass requires a loss_fn; pass one, or forward_only=True")
            self.check_trains()
        if calculate_entropy and not self.has_entropy:
            raise ValueError(
                "a value model has no entropy; call infer_batch(batch, entropy=False), or "
                "forward_backward_batch(..., calculate_entropy=False)"
            )

    @abstractmethod
    def forward_step(
        self, micro_batch: DataProto, loss_fn: MicroBatchLoss | None, *, forward_only: bool, calculate_entropy: bool
    ) -> StepOutput:
        """Run `prepare_model_inputs`, the model, `prepare_model_outputs`, the loss and, if requested, its backward."""

    @abstractmethod
    def prepare_model_inputs(self, micro_batch: DataProto) -> ModelInputs:
        """Pack the rows of a micro-batch for the model, on its device."""

    @abstractmethod
    def prepare_model_outputs(
        self, hidden_states: torch.Tensor, inputs: ModelInputs, *, calculate_entropy: bool
    ) -> Outputs:
        """Compute log-probabilities and entropy, or values [M], from hidden states [M, H] at `inputs.predictors`."""

    def performance(self) -> dict[str, float]:
        """Return the speed of the last `train_batch`, the same on every rank. Collective.

        Returns:
            "perf/step_s" (slowest rank), "perf/tokens_per_s" (prompts and responses of all ranks),
            "perf/tflops_per_rank" (TFLOP/s that the model requires), "perf/mfu" (their share of the peak; absent if the
            peak is unknown, see `EngineConfig.peak_tflops`) and "perf/peak_memory_gib" (largest of all ranks: on GPUs
            during the step, else since the process started). Also the seconds of the step's parts, as means of the
            ranks: "perf/forward_s" and "perf/backward_s" (Megatron alternates: "perf/forward_backward_s"),
            "perf/optimizer_s", and with offloading "perf/offload_s".
        """
        config = self.engine_config
        return self.meter.report(
            self._counted_model(),
            dtype=config.param_dtype,
            peak_tflops=config.peak_tflops,
            ranks_per_row=config.ranks_per_row,
            group=self.groups.control,
        )

    @abstractmethod
    def _counted_model(self) -> Any:
        """Return the model in Hugging Face's classes, for `training_flops`."""

    def optimizer_step(self) -> float:
        """Clip the gradient by its global norm and update the weights. Collective.

        A gradient that is not finite does not change weights or optimizer; see `OptimizerConfig.nonfinite`.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            RuntimeError: no optimizer; a backward has failed since `optimizer_zero_grad`; or the gradient is not finite
                and `nonfinite` is "raise" (on every rank).
        """
        self.check_trains()
        assert self.optimizer_config is not None
        with self._offloader.onloaded("optimizer"):
            with self.meter.part("optimizer"):
                norm = self.grad_norm()
                if math.isfinite(norm):
                    self.apply_gradient(norm)
            if math.isfinite(norm):
                return norm
        where = "; ".join(self.find_nonfinite()) or "the sum of its squares only"
        if self.optimizer_config.nonfinite == "raise":
            self.optimizer_zero_grad()
            raise RuntimeError(
                f"the gradient of step {self.step} has the norm {norm}: it is not finite in {where}. Nothing was "
                "updated; look at the loss and the batch, or set OptimizerConfig.nonfinite to 'skip'"
            )
        self.skipped_steps += 1
        if self.get_data_parallel_rank() == 0:
            _log.warning(
                "skipped step %d (%d so far): its gradient is not finite in %s", self.step, self.skipped_steps, where
            )
        return norm

    @abstractmethod
    def grad_norm(self) -> float:
        """Return the L2 norm of the gradient over all ranks, the same on each of them. Collective."""

    @abstractmethod
    def apply_gradient(self, norm: float) -> None:
        """Clip the gradient, whose norm is `norm`, and update the weights."""

    def find_nonfinite(self) -> list[str]:
        """Return up to three "rank R: NAME" of parameters whose gradient is not finite. Collective."""
        by_rank = all_gather(self._nonfinite_params()[:3], self.groups.control)
        return [f"rank {rank}: {name}" for rank, names in enumerate(by_rank) for name in names][:3]

    @abstractmethod
    def _nonfinite_params(self) -> list[str]:
        """Return the names of this rank's parameters whose gradient is not finite."""

    def lr_scheduler_step(self) -> float:
        """Advance the learning-rate schedule; return the learning rate of the step before."""
        assert self.optimizer_config is not None
        used = learning_rate(self.optimizer_config, self.step)
        self.step += 1
        return used

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Create a new optimizer state and restart the schedule at step 0; keep the weights.

        Raises:
            ValueError: the engine was created without an optimizer, so no weight is trainable.
        """
        if self.optimizer_config is None:
            raise ValueError("this engine was created without an optimizer; create it with an OptimizerConfig to train")
        self._new_optimizer(optimizer)
        self.optimizer_config = optimizer
        self.step = self.skipped_steps = 0

    @abstractmethod
    def _new_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Replace the optimizer state by that of step 0."""
