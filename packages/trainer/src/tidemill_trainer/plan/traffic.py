"""Bytes that a step moves."""

from dataclasses import dataclass

from tidemill_engines import FSDP2Config

from tidemill_trainer.config import Config
from tidemill_trainer.plan.engine import ITEM_BYTES
from tidemill_trainer.plan.model import ModelSizes
from tidemill_trainer.plan.phases import engine_weight_bytes

_INFERRED_BYTES = 8 + 8  # input_ids and responses, int64
_TRAINED_BYTES = 8 + 8 + 4 * 4  # also response_mask, old_log_probs, advantages, loss_weights, float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Episodes and optimizer steps of a step.

    Attributes:
        prompts: prompts of a step.
        n: episodes of a prompt.
        optimizer_steps: optimizer steps of the policy.
        episodes: episodes of an optimizer step; the last one of an epoch may have fewer.
    """

    prompts: int
    n: int
    optimizer_steps: int
    episodes: int

    def sentence(self) -> str:
        """Return the sizes of a step in words."""
        total, s = self.prompts * self.n, "" if self.optimizer_steps == 1 else "s"
        return f"{self.prompts} prompts x {self.n} = {total} episodes, {self.optimizer_steps} optimizer step{s} of " + (
            f"{self.episodes}" if total % self.episodes == 0 else f"at most {self.episodes}"
        )


def steps_of(config: Config) -> Steps:
    """Return the sizes of a step."""
    prompts, n = config.data.train_batch_size, config.rollout.n
    size = prompts if config.actor.ppo_mini_batch_size is None else config.actor.ppo_mini_batch_size
    number = config.actor.ppo_epochs * -(-prompts // size)
    return Steps(prompts=prompts, n=n, optimizer_steps=number, episodes=size * n)


def bytes_per_step(config: Config, sizes: ModelSizes) -> dict[str, float]:
    """Return the bytes of each kind of transfer in a step, for the policy, with episodes of the maximum length.

    - "weights to engines": `engine_weight_bytes`, for each engine; with "fp8", embeddings and head are
      sent in the dtype of the master weights.
    - "all-gather", "reduce-scatter" of FSDP2, received by each rank in an optimizer step: (n - 1) / n x P x
      `param_dtype` for each pass of a micro-batch (two in training; with `reshard_after_forward=false` one for all
      micro-batches), and (n - 1) / n x trainable x `reduce_dtype`.
    - "batch to workers": columns of all episodes, once for the log-probs and once for each epoch.
    """
    steps, engine = steps_of(config), config.engine
    longest = config.data.max_prompt_length + config.rollout.response_length
    sent = engine_weight_bytes(config, sizes)
    if config.rollout.quantization == "fp8":
        sent += sizes.root * (ITEM_BYTES[engine.weight_dtype(config.model)] - ITEM_BYTES[config.rollout.dtype])
    moved: dict[str, float] = {"weights to engines": sent * config.rollout.num_engines}
    if isinstance(engine, FSDP2Config):
        n = config.actor.num_workers if engine.fsdp_size == -1 else engine.fsdp_size
        num_micro = passes = 1
        if engine.reshard_after_forward:
            rows = -(-steps.episodes * engine.ranks_per_row // config.actor.num_workers)  # of each data-parallel part
            num_micro = -(-rows // max(1, engine.max_tokens // longest))
            passes = 2 * num_micro
        part = (n - 1) / n
        moved["all-gather per rank and optimizer step"] = part * sizes.total * ITEM_BYTES[engine.param_dtype] * passes
        reduced = part * sizes.trainable * ITEM_BYTES[engine.reduce_dtype] * num_micro
        moved["reduce-scatter per rank and optimizer step"] = reduced
    per_token = _INFERRED_BYTES + config.actor.ppo_epochs * _TRAINED_BYTES
    moved["columns of the batch to the workers"] = steps.prompts * steps.n * longest * per_token
    return moved
