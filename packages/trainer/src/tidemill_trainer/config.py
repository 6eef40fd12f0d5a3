"""The configuration of a training run: one frozen dataclass per section of the TOML file."""

import math
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat
from pydantic.dataclasses import dataclass
from tidemill_engines.config import EngineConfig, ModelConfig, OptimizerConfig
from tidemill_engines.megatron.config import MegatronConfig

_Count = Annotated[int, Field(ge=1)]
_CountOrZero = Annotated[int, Field(ge=0)]
_Fraction = Annotated[float, Field(ge=0, le=1)]
_Positive = Annotated[float, Field(gt=0)]
_Seed = Annotated[int, Field(ge=0, lt=2**64)]


def _group_size(n: int) -> int:
    _require(n >= 2, "must be >= 2 (GRPO compares the responses to one prompt)")
    return n


def _top_k(k: int) -> int:
    _require(k == -1 or k >= 1, "must be >= 1, or -1 for all tokens")
    return k


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Problems to train on and to validate on.

    Attributes:
        train_files, val_files: `.jsonl` or `.parquet`; each row has `prompt` (a string, or chat messages), and may have
            `ground_truth`, `data_source`, `extra_info` and, for the warm-up, `response`. verl's nested
            `reward_model.ground_truth` is read too. A string is encoded without special tokens: what a model wants
            before it, such as a BOS, must stand in it; chat messages get what the chat template says.
        train_batch_size: prompts per step.
        max_prompt_length: in tokens.
        overlong_prompts: "error" refuses a file with a longer prompt, "skip" leaves such rows out and says how many.
    """

    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()
    train_batch_size: _Count = 64
    max_prompt_length: _Count = 512
    overlong_prompts: Literal["error", "skip"] = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How SGLang generates.

    Attributes:
        n: responses per prompt, the group of GRPO.
        temperature, top_p, top_k: of the training rollouts; validation decodes greedily.
        response_length: at most so many new tokens.
        device: "auto" takes CUDA where it is usable.
        dtype: of the engine's weights.
        num_engines: engines that share the prompts, each with `tensor_parallel_size` devices.
        num_gpus_per_engine: what Ray reserves for an engine on CUDA; a fraction shares a device with the trainer. None
            takes tensor_parallel_size.
        max_total_tokens: size of the KV pool in tokens; None lets SGLang choose.
        mem_fraction_static: share of the device memory for weights and KV pool on CUDA.
        deterministic: every response has a seed of its own, so a run can be repeated token by token.
        engine_args: further arguments of `sglang.Engine`, passed as they are.
        timeout_s: deadline of the engine's start and of one generation.
    """

    n: Annotated[int, AfterValidator(_group_size)] = 8
    temperature: _Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, AfterValidator(_top_k)] = -1
    response_length: _Count = 512
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    num_engines: _Count = 1
    tensor_parallel_size: _Count = 1
    num_gpus_per_engine: _Positive | None = None
    max_total_tokens: _Count | None = None
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.5
    deterministic: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)
    timeout_s: _Positive = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """The reward function and what happens when it fails.

    Attributes:
        function: a registered name ("exact_match"), "pkg.mod:attr" or "path/file.py:attr".
        on_error: "zero" gives a sample whose function raises a reward of 0, counts and reports it; "stop" ends the run.
            A function that fails on every sample of the run's first batch ends it, too.
        timeout_s: deadline of one call, which then counts as one that raised; inf for none. See
            `tidemill_trainer.deadline` for what it can interrupt.
    """

    function: str = "exact_match"
    on_error: Literal["zero", "stop"] = "zero"
    timeout_s: _Positive = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """How rewards become advantages.

    Attributes:
        norm_adv_by_std_in_grpo: divide by the group's standard deviation (GRPO), or only subtract the mean (Dr. GRPO).
        shuffle_rewards: a negative control: rewards are permuted within the batch, so nothing can be learnt.
    """

    norm_adv_by_std_in_grpo: bool = True
    shuffle_rewards: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterReplayConfig:
    """Which experts of a mixture the tokens of a batch are sent to, by verl's names; the Megatron engine has it.

    Attributes:
        mode: "disabled" leaves it to the routers. "R2": the update sends tokens to the experts that they were sent to
            when `old_log_probs` were computed. "R3" (rollout routing replay): both send them to those of the rollout.
    """

    mode: Literal["disabled", "R2", "R3"] = "disabled"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig:
    """The policy update.

    Attributes:
        ppo_mini_batch_size: prompts per optimizer step; None takes the whole batch.
        ppo_epochs: passes over the batch.
        clip_ratio_low, clip_ratio_high: the ratio is clipped to [1 - low, 1 + high].
        clip_ratio_c: bound of the dual clip for negative advantages.
        entropy_coeff: weight of the entropy bonus.
        loss_agg_mode: "token-mean" over the batch, or a mean over sequences of the tokens' sum or mean.
        router_replay: of a mixture of experts.
        num_workers: training processes, of which each owns one device; `engine` divides the model among them, and
            what remains is data parallelism.
        num_gpus_per_worker: what Ray reserves for one on CUDA; a fraction shares the device with an engine.
        omp_num_threads: threads of each worker on the CPU.
        timeout_s: deadline of one call to the workers.
    """

    ppo_mini_batch_size: _Count | None = None
    ppo_epochs: _Count = 1
    clip_ratio_low: _Fraction = 0.2
    clip_ratio_high: Annotated[float, Field(ge=0)] = 0.2
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    entropy_coeff: FiniteFloat = 0.0
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    num_workers: _Count = 1
    num_gpus_per_worker: _Positive = 1.0
    omp_num_threads: _Count = 1
    timeout_s: _Positive = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupConfig:
    """Supervised fine-tuning on the training files' `response` before reinforcement learning, by the same engine.

    Attributes:
        max_steps: 0 switches the warm-up off.
        batch_size: rows per step.
        lr: learning rate of the warm-up; the optimizer starts afresh for the reinforcement learning after it.
        test_freq: validate every so many steps; 0 means at the end only.
        until_accuracy: the warm-up ends once the held-out accuracy has reached this.
    """

    max_steps: _CountOrZero = 0
    batch_size: _Count = 128
    lr: Annotated[FiniteFloat, Field(ge=0)] = 1e-3
    test_freq: _CountOrZero = 10
    until_accuracy: _Fraction = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdateConfig:
    """How weights travel to the engines.

    Attributes:
        bucket_bytes: weights travel in buckets of this size.
        memory: where the buckets are: "auto" (the trainer's device) or "cpu", which also serves engines on other GPUs.
        timeout_s: deadline of each call to an engine; below `engine.timeout_s`, after which the other ranks give up.
    """

    bucket_bytes: _Count = 512 << 20
    memory: Literal["auto", "cpu"] = "auto"
    timeout_s: _Positive = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """The run.

    Attributes:
        name: of the folder in `run_dir`; None takes the config file's name and the time.
        total_steps: steps of the reinforcement learning, each on one batch of prompts; with mini-batches or epochs a
            step is several optimizer steps, which `optimizer.total_steps` and `lr_warmup_steps` count.
        val_before_train: validate before the first step (after a warm-up this is always done).
        stop_at_accuracy: ends the run at the first validation that reaches it; between 0 and 1.
        test_freq: validate every so many steps; 0 means at the end only.
        save_freq: a checkpoint every so many steps. 0 means at the end only: what is interrupted before that cannot be
            resumed (but from the end of its warm-up, if it has one).
        max_ckpt_to_keep: older checkpoints are removed.
        save_samples: rollouts written to `rollouts.jsonl` at each step.
        seed: of the order of the problems, of mini-batches and of sampling.
        ray_address: of a running cluster, of which the run takes one node; None starts one on this machine and ends it
            with the run.
    """

    name: str | None = None
    run_dir: str = "runs"
    total_steps: _Count = 100
    val_before_train: bool = True
    stop_at_accuracy: _Fraction | None = None
    test_freq: _CountOrZero = 10
    save_freq: _CountOrZero = 0
    max_ckpt_to_keep: _Count = 2
    save_samples: _CountOrZero = 4
    seed: _Seed = 0
    ray_address: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run; the sections of the TOML file are its fields.

    Attributes:
        engine: `backend` says which engine it configures, "fsdp2" or "megatron".
    """

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    engine: Annotated[EngineConfig | MegatronConfig, Field(discriminator="backend")] = field(
        default_factory=EngineConfig
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    weight_update: WeightUpdateConfig = field(default_factory=WeightUpdateConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        longest = self.data.max_prompt_length + self.rollout.response_length
        cap = self.engine.max_token_len_per_gpu
        _require(
            longest <= cap,
            f"data.max_prompt_length + rollout.response_length is {longest}, more than a micro-batch may hold; "
            f"raise engine.max_token_len_per_gpu={cap}",
        )
        pool = self.rollout.max_total_tokens
        _require(
            pool is None or pool >= longest,
            f"rollout.max_total_tokens={pool} holds no response of the longest, data.max_prompt_length + "
            f"rollout.response_length = {longest}",
        )
        _require(math.isfinite(self.optimizer.lr), f"optimizer.lr must be finite; got {self.optimizer.lr}")
        self._check_division()
        size, prompts = self.actor.ppo_mini_batch_size, self.data.train_batch_size
        _require(
            size is None or size <= prompts,
            f"actor.ppo_mini_batch_size={size} is more than the {prompts} prompts of data.train_batch_size",
        )
        mode = self.actor.router_replay.mode
        _require(
            mode == "disabled" or self.engine.backend == "megatron",
            f'actor.router_replay.mode="{mode}" needs engine.backend="megatron": the FSDP2 engine has no router replay',
        )
        _require(
            mode != "disabled" or not isinstance(self.engine, MegatronConfig) or not self.engine.router_replay,
            'engine.router_replay alone replays nothing here; set actor.router_replay.mode="R2" or "R3" instead',
        )
        _require(
            self.weight_update.timeout_s < self.engine.timeout_s,
            f"weight_update.timeout_s={self.weight_update.timeout_s:g} must be below engine.timeout_s="
            f"{self.engine.timeout_s:g}: rank 0 has to give up an engine before the other ranks give up rank 0",
        )
        wants_val = self.trainer.stop_at_accuracy is not None
        _require(
            not wants_val or len(self.data.val_files) > 0,
            "trainer.stop_at_accuracy needs data.val_files to validate on",
        )

    def _check_division(self) -> None:
        """The training workers are divided without remainder."""
        engine, workers = self.engine, self.actor.num_workers
        if isinstance(engine, MegatronConfig):
            sizes = {
                "engine.tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size": (
                    engine.ranks_per_row
                )
            }
        else:
            sizes = {"engine.ulysses_sequence_parallel_size": engine.ulysses_sequence_parallel_size}
            if engine.fsdp_size != -1:
                sizes["engine.fsdp_size"] = engine.fsdp_size
        for key, size in sizes.items():
            _require(workers % size == 0, f"{key} = {size} does not divide actor.num_workers={workers}")
