"""The configuration of a training run: one frozen dataclass per section of the TOML file.

The types carry the constraints of single values; `Config` checks values that depend on each other.
"""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from tidemill_engines import EngineConfig

from tidemill_trainer.algorithm_config import (
    AlgorithmConfig,
    CriticConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from tidemill_trainer.config_types import Count, CountOrZero, Fraction, NotNegative, Positive
from tidemill_trainer.placement import PlacementConfig, against_turns
from tidemill_trainer.run_config import BaseDataConfig, BaseTrainerConfig, RunConfig, WorkersConfig, require


def _top_k(k: int) -> int:
    require(k == -1 or k >= 1, "must be >= 1, or -1 for all tokens")
    return k


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(BaseDataConfig):
    """Training and validation problems.

    Attributes:
        train_files, val_files: `.jsonl` or `.parquet` files. Each row has a `prompt` (a string or chat messages) and
            optionally `ground_truth`, `data_source`, `extra_info` and, for the warm-up, `response`: a string or, after
            chat messages, further messages that start and end with a reply of the assistant. `tools` are put into
            prompts of chat messages, also by "single_turn". verl's nested `reward_model.ground_truth` is also
            supported. A string is encoded without special tokens, so it must contain those that the model requires,
            such as a BOS token; the chat template adds them to chat messages.
        train_batch_size: prompts per step.
        max_prompt_length: maximum length of a prompt in tokens.
        overlong_prompts: "error" rejects a file with a longer prompt; "skip" drops such rows and reports how many.
    """

    max_prompt_length: Count = 512
    overlong_prompts: Literal["error", "skip"] = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Generation with SGLang.

    Attributes:
        n: responses per prompt (the group size of GRPO); at least 2 for estimators that compare them.
        temperature, top_p, top_k: sampling parameters of training rollouts; validation decodes greedily.
        response_length: maximum number of new tokens of a reply. All tokens of an episode, with the prompt and what
            tools returned, are at most `data.max_prompt_length + rollout.response_length`.
        response_lengths: for benchmarks: lengths of replies, of which each training episode gets one by its seed. A
            reply has exactly that many tokens, whatever end tokens are sampled.
        device: "auto" selects CUDA if Ray has GPUs.
        dtype: dtype of the engine's weights.
        quantization: "fp8": projections in float8 with a scale per block of 128 x 128, quantized at each weight update;
            requires GPUs. `tidemill eval` uses `dtype`. None: all weights have `dtype`.
        num_engines: number of engines that share the prompts.
        tensor_parallel_size: devices per engine.
        num_gpus_per_engine: GPUs that Ray reserves per engine; a fraction shares a device with the trainer. None
            reserves `tensor_parallel_size`.
        max_total_tokens: size of the KV pool in tokens; None lets SGLang choose.
        mem_fraction_static: share of the GPU memory for weights and KV pool.
        deterministic: sample every response with its own seed, so that a run can be reproduced token by token.
        engine_args: additional arguments of `sglang.Engine`, passed unchanged. Episodes with stop strings require
            `{"skip_tokenizer_init": False}`; by default the engine only sees tokens.
        max_staleness: how many updates there may be between the weights that sampled a token and the update that trains
            on it. 0: generation and training take turns. With k > 0, up to k further batches are generated meanwhile,
            which requires a correction: `algorithm.bypass_mode`, or one of its `rollout_is` and `rollout_rs`.
        partial_rollout: an update interrupts running requests, which continue from their tokens under the new weights.
            false: the update waits until they have finished.
        recompute_kv_cache: interrupted requests compute the keys and values of their tokens again, under the new
            weights. false: they keep those of the old weights, which saves the time; engines in turns cannot.
        max_log_prob_abs_diff: the run stops when the mean difference of the log-probs of rollout and training is
            larger (see `tidemill_trainer.mismatch`). None: a limit by dtype.
        timeout_s: timeout of the engine's start and of the generation of one reply.
        max_restarts: how many engines that died may be started again during the run; one more ends it.
    """

    n: Count = 8
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, AfterValidator(_top_k)] = -1
    response_length: Count = 512
    response_lengths: tuple[Count, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    quantization: Literal["fp8"] | None = None
    num_engines: Count = 1
    tensor_parallel_size: Count = 1
    num_gpus_per_engine: Positive | None = None
    max_total_tokens: Count | None = None
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.5
    deterministic: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)
    max_staleness: CountOrZero = 0
    partial_rollout: bool = True
    recompute_kv_cache: bool = True
    max_log_prob_abs_diff: Positive | None = None
    timeout_s: Positive = 1800.0
    max_restarts: CountOrZero = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeConfig:
    """The episodes, which run in processes of their own.

    Attributes:
        function: "single_turn" generates one reply to the prompt and scores it with the reward function. Others are
            "pkg.mod:attr" or "path/file.py:attr": `async def episode(problem, session)` returns the reward (see
            tidemill-rollout).
        num_workers: number of processes.
        max_concurrent: maximum number of episodes that a process runs at the same time.
        max_turns: maximum number of replies of an episode.
        timeout_s: time limit of an episode, which then counts as truncated. With engines in turns, the training that
            interrupts it does not count.
        max_retries: how often an episode is repeated after an environment error. An episode that fails each time is not
            trained on.
        max_error_share: the run stops when more than this share of the episodes of a step or validation failed each
            time.
    """

    function: str = "single_turn"
    num_workers: Count = 1
    max_concurrent: Count = 1024
    max_turns: Count = 100
    timeout_s: Positive = 600.0
    max_retries: CountOrZero = 2
    max_error_share: Fraction = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """The reward function of the episode "single_turn".

    Attributes:
        function: a registered name ("exact_match"), "pkg.mod:attr" or "path/file.py:attr". An error of the function is
            an environment error of its episode. None: "exact_match", or none at all with a reward model. "endpoint":
            the score of a reward model on an SGLang server (see `RewardEndpoint` of tidemill-rollout).
        url: address of the server of "endpoint", such as "http://127.0.0.1:30000".
        timeout_s: timeout of one call, which then counts as an error; inf disables it.
    """

    function: str | None = None
    url: str | None = None
    timeout_s: Positive = 60.0

    @property
    def is_endpoint(self) -> bool:
        """Whether an HTTP endpoint scores the episodes."""
        return self.function == "endpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterReplayConfig:
    """Router replay for MoE models, with verl's names. Requires the Megatron engine.

    Attributes:
        mode: "disabled": the routers choose the experts. "R2": the update uses the experts that the routers chose when
            `old_log_probs` were computed. "R3" (rollout routing replay): `old_log_probs` and the update use the experts
            of the rollout.
    """

    mode: Literal["disabled", "R2", "R3"] = "disabled"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig(WorkersConfig):
    """The policy update, and the training processes.

    Attributes:
        ppo_mini_batch_size: prompts per optimizer step; None uses the whole batch.
        ppo_epochs: passes over the batch.
        router_replay: router replay for MoE models.
    """

    ppo_mini_batch_size: Count | None = None
    ppo_epochs: Count = 1
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupConfig:
    """Supervised fine-tuning on the `response` of the training files before reinforcement learning.

    Attributes:
        max_steps: maximum number of steps; 0 disables the warm-up.
        batch_size: rows per step.
        lr: learning rate of the warm-up, constant after `optimizer.lr_warmup_steps` steps, in which it rises. The
            optimizer is reset before reinforcement learning.
        test_freq: validate every `test_freq` steps; 0 validates only after the last step.
        until_accuracy: stop the warm-up at the first validation with at least this held-out accuracy.
    """

    max_steps: CountOrZero = 0
    batch_size: Count = 128
    lr: NotNegative = 1e-3
    test_freq: CountOrZero = 10
    until_accuracy: Fraction = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdateConfig:
    """The transfer of weights from the training workers to the engines.

    Attributes:
        bucket_bytes: size of a bucket of weights in bytes.
        memory: memory of the buckets: "auto" (the trainer's device) or "cpu", which engines on other GPUs can also
            read.
        timeout_s: timeout of each call to an engine. Must be below `engine.timeout_s`, the time that the other ranks
            wait for rank 0.
    """

    bucket_bytes: Count = 512 << 20
    memory: Literal["auto", "cpu"] = "auto"
    timeout_s: Positive = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig(BaseTrainerConfig):
    """The run.

    Attributes:
        total_steps: steps of reinforcement learning, each on one batch of prompts. With mini-batches or epochs, a step
            consists of several optimizer steps, which `optimizer.total_steps` and `optimizer.lr_warmup_steps` count.
        val_before_train: validate before the first step. After a warm-up, the model is always validated.
        stop_at_accuracy: stop the run at the first validation with at least this held-out accuracy.
        save_samples: rollouts per step that are written to `rollouts.jsonl`.
        save_batches: record each step for `tidemill replay`: the batch and a hash of the updated weights. A token of a
            response takes 24 bytes on disk, one of a prompt 16.
    """

    total_steps: Count = 100
    val_before_train: bool = True
    stop_at_accuracy: Fraction | None = None
    save_samples: CountOrZero = 4
    save_batches: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(RunConfig):
    """The configuration of a run of reinforcement learning. Each field is a section of the TOML file.

    Attributes:
        data: training and validation problems.
        rollout: generation with SGLang.
        placement: which processes share GPUs.
        episode: the episodes.
        reward: the reward function.
        algorithm: advantages and policy loss.
        actor: the policy update.
        reference: the reference policy.
        critic: the value model.
        teacher: the model to distill.
        reward_model: a model whose score is the reward or a part of it.
        warmup: supervised fine-tuning before reinforcement learning.
        weight_update: transfer of weights to the engines.
        trainer: length, validation, checkpoints and location of the run.
    """

    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    weight_update: WeightUpdateConfig = field(default_factory=WeightUpdateConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        self._check_lengths()
        self._check_reward()
        size, prompts = self.actor.ppo_mini_batch_size, self.data.train_batch_size
        require(
            size is None or size <= prompts,
            f"actor.ppo_mini_batch_size must be <= data.train_batch_size={prompts}, got {size}",
        )
        missing = against_turns(self)
        require(self.placement.engines != "turns" or missing is None, f'placement.engines="turns" requires {missing}')
        rollout, comparing = self.rollout, self.algorithm.compares_responses
        require(
            rollout.n >= 2 or comparing is None,
            f"rollout.n must be >= 2 with algorithm.{comparing}, which compares responses to a prompt, got {rollout.n}",
        )
        require(
            rollout.quantization is None or (rollout.dtype == "bfloat16" and rollout.device != "cpu"),
            'rollout.quantization="fp8" requires rollout.dtype="bfloat16" and GPUs, got '
            f'rollout.dtype="{rollout.dtype}" and rollout.device="{rollout.device}"',
        )
        require(
            self.rollout.partial_rollout or self.rollout.recompute_kv_cache,
            "rollout.recompute_kv_cache=false requires rollout.partial_rollout=true: no request runs during an update "
            "that waits until they have finished",
        )
        mode = self.actor.router_replay.mode
        require(
            mode == "disabled" or self.engine.backend == "megatron",
            f'actor.router_replay.mode="{mode}" requires engine.backend="megatron"; the FSDP2 engine does not support '
            "router replay",
        )
        require(
            mode != "R2" or not self.algorithm.bypass_mode,
            'actor.router_replay.mode="R2" requires the log-probs of the policy; use "R3", or no algorithm.bypass_mode',
        )
        require(
            mode != "disabled" or not self.engine.replays_routing,
            'engine.router_replay has no effect by itself; set actor.router_replay.mode="R2" or "R3" instead',
        )
        require(
            self.weight_update.timeout_s < self.engine.timeout_s,
            f"weight_update.timeout_s must be < engine.timeout_s={self.engine.timeout_s:g}, got "
            f"{self.weight_update.timeout_s:g}: rank 0 must time out on an engine before the other ranks time out on "
            "rank 0",
        )
        require(
            self.trainer.stop_at_accuracy is None or len(self.data.val_files) > 0,
            "trainer.stop_at_accuracy requires data.val_files; set them, or remove trainer.stop_at_accuracy",
        )

    def _check_lengths(self) -> None:
        longest = self.data.max_prompt_length + self.rollout.response_length
        cap = self.engine.max_tokens
        replayed = max(self.rollout.response_lengths, default=0)
        require(
            replayed <= self.rollout.response_length,
            f"rollout.response_lengths must be <= rollout.response_length={self.rollout.response_length}, got "
            f"{replayed}; raise rollout.response_length, or lower the lengths (--lengths of tidemill bench)",
        )
        require(
            longest <= cap,
            f"data.max_prompt_length + rollout.response_length must be <= {cap}, the tokens of a micro-batch, got "
            f"{longest}; raise engine.max_token_len_per_gpu",
        )
        require(
            self.reward_model.path is None or longest < cap,
            f"data.max_prompt_length + rollout.response_length must be < {cap}, the tokens of a micro-batch, with "
            f"reward_model.path, because the reward model reads one more token, got {longest}; raise "
            "engine.max_token_len_per_gpu",
        )
        buffer = self.algorithm.overlong_buffer_len
        require(
            buffer is None or buffer <= self.rollout.response_length,
            f"algorithm.overlong_buffer_len must be <= rollout.response_length={self.rollout.response_length}, got "
            f"{buffer}; lower it",
        )
        pool = self.rollout.max_total_tokens
        require(
            pool is None or pool >= longest,
            f"rollout.max_total_tokens must be >= data.max_prompt_length + rollout.response_length = {longest}, "
            f"got {pool}; raise it, or remove it to let SGLang choose",
        )

    def _check_reward(self) -> None:
        reward, episode = self.reward, self.episode.function
        require(
            not reward.is_endpoint or reward.url is not None,
            'reward.function="endpoint" requires reward.url, the address of an SGLang server with a reward model, such '
            'as "http://127.0.0.1:30000"',
        )
        require(
            reward.is_endpoint or reward.url is None,
            f'reward.url="{reward.url}" requires reward.function="endpoint", got {reward.function!r}; set it, or '
            "remove reward.url",
        )
        require(
            not reward.is_endpoint or episode == "single_turn",
            f'reward.function="endpoint" requires episode.function="single_turn", got "{episode}"; an episode of your '
            "own returns its reward itself",
        )

    def training_workers(self) -> dict[str, int]:
        sections = {
            "reference": self.reference,
            "critic": self.critic,
            "teacher": self.teacher,
            "reward_model": self.reward_model,
        }
        own = {f"{role}.num_workers": section.num_workers for role, section in sections.items()}
        return RunConfig.training_workers(self) | {key: number for key, number in own.items() if number is not None}

    def policy_engine(self) -> EngineConfig:
        return self.engine.with_router_replay() if self.actor.router_replay.mode != "disabled" else self.engine
