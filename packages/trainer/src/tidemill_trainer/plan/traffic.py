"""Bytes that a step moves."""

from dataclasses import dataclass

from tidemill_engines import FSDP2Config

from tidemill_trainer.config import Config
from tidemill_trainer.plan.engine import ITEM_BYTES
from tidemill_trainer.plan.model import ModelSizes
from tidemill_trainer.plan.phases import engine_weight_bytes
from tidemill_trainer.run_config import RunConfig
from tidemill_trainer.sft.config import SFTConfig

_INFERRED_BYTES = 8 + 8  # input_ids and responses, int64
_FINE_TUNED_BYTES = 8 + 8 + 4  # also response_mask, float32
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
    - "all-gather", "reduce-scatter" of FSDP2: see `_exchanged_bytes`.
    - "batch to workers": columns of all episodes, once for the log-probs and once for each epoch.
    """
    steps = steps_of(config)
    longest = config.data.max_prompt_length + config.rollout.response_length
    sent = engine_weight_bytes(config, sizes)
    if config.rollout.quantization == "fp8":
        sent += sizes.root * (ITEM_BYTES[config.engine.weight_dtype(config.model)] - ITEM_BYTES[config.rollout.dtype])
    moved: dict[str, float] = {"weights to engines": sent * config.rollout.num_engines}
    moved |= _exchanged_bytes(config, sizes, steps.episodes, longest)
    per_token = _INFERRED_BYTES + config.actor.ppo_epochs * _TRAINED_BYTES
    moved["columns of the batch to the workers"] = steps.prompts * steps.n * longest * per_token
    return moved


def fine_tuning_bytes(config: SFTConfig, sizes: ModelSizes) -> dict[str, float]:
    """Return the bytes of each kind of transfer in a step of `tidemill sft`, with rows of the maximum length.

    The columns of the batch are sent for the update and, with DPO, for the log-probs before it.
    """
    longest, rows = config.data.max_length, num_rows(config)
    per_token = _FINE_TUNED_BYTES + (0 if config.dpo is None else _INFERRED_BYTES)
    columns = {"columns of the batch to the workers": float(rows * longest * per_token)}
    return _exchanged_bytes(config, sizes, rows, longest) | columns


def num_rows(config: SFTConfig) -> int:
    """Return the rows of a step of `tidemill sft`: one per example, and two per pair."""
    return config.data.train_batch_size * (1 if config.dpo is None else 2)


def _exchanged_bytes(config: RunConfig, sizes: ModelSizes, rows: int, longest: int) -> dict[str, float]:
    """Return what each rank of FSDP2 receives in an optimizer step on `rows` rows of `longest` tokens.

    All-gather: (n - 1) / n x P x `param_dtype` for each pass of a micro-batch (two in training; with
    `reshard_after_forward=false` one for all micro-batches). Reduce-scatter: (n - 1) / n x trainable x `reduce_dtype`.
    Empty for Megatron.
    """
    engine = config.engine
    if not isinstance(engine, FSDP2Config):
        return {}
    n = config.actor.num_workers if engine.fsdp_size == -1 else engine.fsdp_size
    num_micro = passes = 1
    if engine.reshard_after_forward:
        of_part = -(-rows * engine.ranks_per_row // config.actor.num_workers)  # of each data-parallel part
        num_micro = -(-of_part // max(1, engine.max_tokens // longest))
        passes = 2 * num_micro
    part = (n - 1) / n
    reduced = part * sizes.trainable * ITEM_BYTES[engine.reduce_dtype] * num_micro
    return {
        "all-gather per rank and optimizer step": part * sizes.total * ITEM_BYTES[engine.param_dtype] * passes,
        "reduce-scatter per rank and optimizer step": reduced,
    }
