"""The configuration of `tidemill sft`: one frozen dataclass per section of the TOML file."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tidemill_trainer.config_types import Count, Positive
from tidemill_trainer.run_config import BaseDataConfig, BaseTrainerConfig, RunConfig, require


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTDataConfig(BaseDataConfig):
    """Training and validation examples.

    Attributes:
        train_files, val_files: `.jsonl` or `.parquet` files. Each row has chat messages (`messages_key`) with optional
            `tools`, or a `prompt` and a `response`. With DPO it has `chosen` and `rejected`, which are messages, or a
            `prompt` with two responses.
        messages_key: column of the chat messages, in OpenAI's format.
        train_batch_size: examples per step; with DPO pairs.
        max_length: maximum length of an example in tokens.
        truncation: what happens to a longer example: "error" rejects its file; "right" drops the tokens at its end.
    """

    messages_key: str = "messages"
    max_length: Count = 1024
    truncation: Literal["error", "right"] = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTTrainerConfig(BaseTrainerConfig):
    """The run.

    Attributes:
        total_epochs: passes over the training examples. `--resume` may raise it.
    """

    total_epochs: Count = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOConfig:
    """Direct preference optimization instead of supervised fine-tuning.

    Attributes:
        beta: factor of the log-ratio of policy and reference; a smaller one permits larger changes of the policy.
        label_smoothing: assumed probability that the labels of a pair are the wrong way round (conservative DPO).
    """

    beta: Positive = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig(RunConfig):
    """The configuration of a run of `tidemill sft`. Each field is a section of the TOML file.

    Attributes:
        data: training and validation examples.
        dpo: trains with DPO if the section is present.
        trainer: length, validation, checkpoints and location of the run.
    """

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    dpo: DPOConfig | None = None
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        longest = self.engine.max_tokens
        require(
            self.data.max_length <= longest,
            f"data.max_length must be <= {longest}, the tokens of a micro-batch, got {self.data.max_length}; lower it, "
            "or raise engine.max_token_len_per_gpu",
        )
