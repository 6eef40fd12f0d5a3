"""What every training engine offers, and the parts of a step that do not depend on the backend."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from tidemill_dataproto import DataProto

from tidemill_engines.batch.outputs import BatchOutput, StepOutput
from tidemill_engines.config import CheckpointConfig, Dtype, EngineConfig, ModelConfig, OptimizerConfig
from tidemill_engines.hf_weights.export import MAX_SHARD_SIZE
from tidemill_engines.hf_weights.shard import WeightShard
from tidemill_engines.loss.contract import LossFn, MicroBatchLoss
from tidemill_engines.model_io import ModelInputs, Outputs
from tidemill_engines.optimizer import learning_rate
from tidemill_engines.throughput import Meter

_log = logging.getLogger(__name__)
_OWN_METRICS = ("loss", "grad_norm", "grad_nonfinite", "lr")


class BaseEngine(ABC):
    """A model that a group of ranks trains and evaluates; each rank calls the same methods in the same order.

    Every method that takes a batch takes the rows of this rank's `get_data_parallel_rank()`; ranks that have it in
    common are given the same. They have the ragged columns `input_ids` (prompt, then response) and `responses`, and
    `meta_info["temperature"]` (1.0 if absent). A padded batch is as welcome: `input_ids` and `attention_mask` [B, T],
    of which `responses` [B, R] and whatever belongs to them are the last R columns; outputs are [B, R], 0 in padding.

    Attributes:
        step: calls of `lr_scheduler_step`, which the schedule follows.
        skipped_steps: optimizer steps that were left out because the gradient was not finite.
        meter: what the last `train_batch` took.
        has_entropy: whether what the model says of a token is a distribution.
    """

    has_entropy = True

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: EngineConfig,
        optimizer: OptimizerConfig | None,
        checkpoint: CheckpointConfig,
    ) -> None:
        self.model_config = model
        self.engine_config = engine
        self.optimizer_config = optimizer
        self.checkpoint_config = checkpoint
        self.step = 0
        self.skipped_steps = 0
        self.meter = Meter()

    @abstractmethod
    def initialize(self) -> None:
        """Joins or makes the process groups, loads the model and makes the optimizer. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Frees model and optimizer and leaves the process groups that the engine made; again does nothing."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """A context in which the model trains (dropout on), with parameters, gradients and optimizer state at hand.

        Gradients are recorded, even within `torch.no_grad()`, `torch.inference_mode()` or `eval_mode()`.

        It leaves the mode as it was, and sends away again what it had to bring back from the CPU.
        """

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """A context in which the model evaluates (dropout off, no gradients), with its parameters at hand.

        It leaves the mode as it was, and sends away again what it had to bring back from the CPU.
        """

    def train_batch(self, batch: DataProto, loss_fn: LossFn, *, calculate_entropy: bool = False) -> dict[str, float]:
        """One optimizer step on a batch: zero_grad, forward and backward, clip, step, schedule. Collective.

        Args:
            batch: also with the ragged column `response_mask`.
            loss_fn: see `LossFn`.
            calculate_entropy: whether the loss wants `ModelOutput.entropy`.

        Returns:
            The metrics of the loss over the global batch, and "loss", "grad_norm" (before clipping),
            "grad_nonfinite" (1.0 if the gradient was not finite and the step was skipped, else 0.0) and "lr" (that
            the step was made with). The same on every rank.

        Raises:
            ValueError, TypeError: a batch that does not meet the above, on every rank.
            RuntimeError: an engine without an optimizer.
        """
        self.check_trains()
        with self.meter.step(), self.train_mode():
            self.optimizer_zero_grad()
            metrics = self.forward_backward_batch(batch, loss_fn, calculate_entropy=calculate_entropy).metrics
            taken = sorted(set(_OWN_METRICS[1:]) & metrics.keys())
            if taken:
                raise ValueError(f"the loss reports metrics under the engine's own names {taken}; rename them")
            grad_norm = self.optimizer_step()
            lr = self.lr_scheduler_step()
            self.optimizer_zero_grad()
        return metrics | {"grad_norm": grad_norm, "grad_nonfinite": float(not math.isfinite(grad_norm)), "lr": lr}

    def performance(self) -> dict[str, float]:
        """How fast the last `train_batch` was, the same numbers on every rank. Collective.

        An engine that does not count its work reports nothing.

        Returns:
            "perf/step_s" (of the slowest rank), "perf/tokens_per_s" (prompts and responses, all ranks together),
            "perf/tflops_per_rank" (those that the model needs, per second), "perf/mfu" (their share of the peak; left
            out where the peak is unknown, see `EngineConfig.peak_tflops`) and "perf/peak_memory_gib" (of the rank with
            the most: on GPUs during that step, else of the process so far).
        """
        return {}

    def infer_batch(self, batch: DataProto, *, entropy: bool = False) -> DataProto:
        """Log-probabilities of the response tokens of a batch, or their values, without gradients. Collective.

        Returns:
            A batch with the rows of `batch` in their order and the float32 columns `log_probs` and, if asked for,
            `entropy`, or of a value model `values`, ragged like `responses`, on the CPU.

        Raises:
            ValueError, TypeError: a batch that does not meet the above, on every rank.
        """
        with self.eval_mode():
            out = self.forward_backward_batch(batch, None, forward_only=True, calculate_entropy=entropy)
        return DataProto.from_dict(tensors=dict(out.columns))

    @abstractmethod
    def forward_backward_batch(
        self,
        batch: DataProto,
        loss_fn: LossFn | None,
        *,
        forward_only: bool = False,
        calculate_entropy: bool = False,
    ) -> BatchOutput:
        """Runs a batch in micro-batches and, unless `forward_only`, adds its gradient to the parameters. Collective.

        Gradients of several batches add up until `optimizer_zero_grad`. With Megatron that ends with the first norm or
        step, which reduces them over the ranks, and with `overlap_grad_reduce` with the first batch.

        Raises:
            ValueError, TypeError: a batch that does not meet what the class says, on every rank.
            RuntimeError: a backward without an optimizer, or one that is not to follow what Megatron has reduced.
        """

    def check_trains(self) -> None:
        """Raises RuntimeError if the engine has no optimizer."""
        if self.optimizer_config is None:
            raise RuntimeError("this engine has no optimizer; create it with an OptimizerConfig to train")

    def check_request(self, loss_fn: LossFn | None, *, forward_only: bool, calculate_entropy: bool) -> None:
        """What every `forward_backward_batch` refuses before anything else.

        Raises:
            ValueError: a backward without a loss, or the entropy of a model that has none.
            RuntimeError: a backward of an engine without an optimizer, whose weights have no gradients.
        """
        if not forward_only:
            if loss_fn is None:
                raise ValueError("a backward needs a loss_fn; pass one, or forward_only=True")
            self.check_trains()
        if calculate_entropy and not self.has_entropy:
            raise ValueError("a value model has no entropy; leave calculate_entropy out")

    @abstractmethod
    def forward_step(
        self, micro_batch: DataProto, loss_fn: MicroBatchLoss | None, *, forward_only: bool, calculate_entropy: bool
    ) -> StepOutput:
        """`prepare_model_inputs`, the model, `prepare_model_outputs`, the loss and, if wanted, its backward."""

    @abstractmethod
    def prepare_model_inputs(self, micro_batch: DataProto) -> ModelInputs:
        """Packs the rows of a micro-batch for the model, on its device."""

    @abstractmethod
    def prepare_model_outputs(
        self, hidden_states: torch.Tensor, inputs: ModelInputs, *, calculate_entropy: bool
    ) -> Outputs:
        """Turns the hidden states [M, H] at `inputs.predictors` into log-probabilities and entropy, or values [M]."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forgets the gradients: frees them or, where they have buffers of their own (Megatron), zeroes them."""

    def optimizer_step(self) -> float:
        """Clips the gradient by its global norm and updates the weights. Collective.

        A gradient that is not finite updates nothing: as `OptimizerConfig.nonfinite` says, the step is skipped, logged
        and counted in `skipped_steps`, or is an error.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            RuntimeError: the gradient is not finite and the policy is "raise"; on every rank. Or there is no optimizer.
        """
        self.check_trains()
        assert self.optimizer_config is not None
        norm = self.grad_norm()
        if math.isfinite(norm):
            self.apply_gradient(norm)
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
        """The L2 norm of the gradient over all ranks, the same number on each of them. Collective."""

    @abstractmethod
    def apply_gradient(self, norm: float) -> None:
        """Clips the gradient, whose norm is `norm`, and updates the weights."""

    @abstractmethod
    def find_nonfinite(self) -> list[str]:
        """Up to three "rank R: NAME" of parameters whose gradient is not finite. Collective."""

    def lr_scheduler_step(self) -> float:
        """Moves the schedule on by one step and returns the learning rate that the step behind it had."""
        assert self.optimizer_config is not None
        used = learning_rate(self.optimizer_config, self.step)
        self.step += 1
        return used

    @abstractmethod
    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Starts the optimizer and its schedule afresh, as at step 0, and keeps the weights.

        Raises:
            ValueError: the engine was made without an optimizer, so no weight is trainable.
        """
        if self.optimizer_config is None:
            raise ValueError("this engine was made without an optimizer; create it with an OptimizerConfig to train")

    @abstractmethod
    def get_per_tensor_param(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by their names in the Hugging Face checkpoint, lazily, in its order; tied copies are left out.

        Adapters are merged into what is handed out. Taking the next weight is collective then, and with Megatron, which
        gathers weights before it hands them out.

        Args:
            dtype: that floating-point weights are cast to; None leaves them as the model holds them: as master weights,
                or with Megatron as parameters, of which the optimizer alone has masters, if they are bfloat16.

        Yields:
            Name and DTensor (or whole tensor), detached and valid until the next step. Gathering a DTensor is
            collective, so all ranks must take the same weights in the same order.
        """

    def get_per_tensor_shards(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
        """What this rank holds of the weights, by the names of `get_per_tensor_param`; nothing is gathered.

        DTensors say themselves what they are a part of; whatever is cut otherwise comes as `WeightShard`s. Ranks may
        have different names, and a name comes with each part of it that a rank has.

        Args:
            dtype: that floating-point weights are cast to; None leaves them.

        Yields:
            Name and part, detached and valid until the next step.
        """
        return self.get_per_tensor_param(dtype)

    @property
    def streams_weights(self) -> bool:
        """Whether weights are handed out as copies, such as merged adapters or of what is kept on the CPU.

        Then take one, let go of it, and take the next, since all of them would be the weights once more.
        """
        return False

    def get_adapter_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `get_per_tensor_param`, the parameters of the adapters alone, by peft's names; none without adapters."""
        return iter(())

    def save_adapter(self, path: str | Path) -> None:
        """Writes the adapters alone to `path`, in the format of peft. Collective.

        Raises:
            ValueError: the engine trains no adapter.
            OSError: a write failed; raised on every rank.
        """
        raise ValueError(f"{type(self).__name__} trains no adapter; save all weights with save_hf() instead of {path}")

    @abstractmethod
    def save_checkpoint(self, path: str | Path) -> None:
        """Writes weights, optimizer, schedule and random state to a fresh folder `path`, sharded. Collective.

        The folder appears under its name when it is whole, at once or in the background (`CheckpointConfig`).

        Raises:
            OSError: `path` exists or a write failed; raised on every rank. Nothing of it is left.
        """

    def finish_checkpoint(self) -> None:  # noqa: B027 - an engine that saves at once has nothing to wait for
        """Waits until a checkpoint that is saved in the background is whole; else does nothing.

        Raises:
            OSError: it could not be saved; raised on every rank.
        """

    @abstractmethod
    def load_checkpoint(self, path: str | Path) -> None:
        """Continues exactly where `save_checkpoint` was called, on any number of ranks in any layout. Collective.

        Gradients are forgotten. On as many ranks as saved it, the random states are restored too.

        Raises:
            FileNotFoundError: `path` holds no whole checkpoint.
            ValueError: it is damaged, of another format version or another model. Nothing was changed.
        """

    @abstractmethod
    def save_hf(
        self, path: str | Path, dtype: Dtype | None = None, *, max_shard_size: int | str = MAX_SHARD_SIZE
    ) -> None:
        """Writes the model to `path` in Hugging Face format, with the tokenizer files of its origin. Collective.

        Args:
            dtype: as of `get_per_tensor_param`.
            max_shard_size: of a safetensors file, and of the memory that holds it while it is written: bytes, or a text
                such as "5GB". More than one file have an index beside them.

        Raises:
            ValueError: `max_shard_size` is not a size.
            OSError: a write failed; raised on every rank.
        """

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Which part of the global batch this rank works on."""

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """In how many parts the global batch is split."""

    @abstractmethod
    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that work on different parts of the batch (a gloo group, for plain data on the CPU)."""

    @abstractmethod
    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank is the one of its data-parallel part whose outputs are collected."""
