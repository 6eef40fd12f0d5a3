"""Loading of everything that the configuration of `tidemill sft` refers to."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill_dataproto import DataProto

from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.doctor.machine import check_machine
from tidemill_trainer.preflight import check_policy
from tidemill_trainer.progress import Progress
from tidemill_trainer.sft.batches import Batches
from tidemill_trainer.sft.config import SFTConfig
from tidemill_trainer.sft.dataset import Encoder, load_examples
from tidemill_trainer.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTInputs:
    """Data of a run, loaded and checked before any process starts.

    Attributes:
        train: training rows, in the order of the files.
        val: validation rows; None without validation files.
    """

    train: DataProto
    val: DataProto | None


def load_sft_inputs(config: SFTConfig, progress: Progress) -> SFTInputs:
    """Check model and machine, and load and encode the data.

    Raises:
        ConfigError, DataError: a user error (reported without a traceback).
    """
    check_machine(config, progress)
    check_policy(config, config.data.max_length, "data.max_length")
    tokenizer = load_tokenizer(config.model)

    def load(files: Sequence[str]) -> DataProto:
        encoder = Encoder(tokenizer, config.data)
        rows = load_examples(files, encoder.example if config.dpo is None else encoder.pair)
        if encoder.num_truncated:
            progress.warn(
                f"truncated {encoder.num_truncated} of {len(rows)} examples of {', '.join(files)} to "
                f"data.max_length={config.data.max_length} tokens"
            )
        return rows

    inputs = SFTInputs(
        train=load(config.data.train_files),
        val=load(config.data.val_files) if config.data.val_files else None,
    )
    _check_sizes(config, inputs.train, progress)
    return inputs


def train_batches(config: SFTConfig, train: DataProto) -> Batches:
    """Return the batches of a run."""
    return Batches(
        train,
        config.data.train_batch_size,
        config.trainer.seed,
        num_epochs=config.trainer.total_epochs,
        rows_per_example=1 if config.dpo is None else 2,
    )


def _check_sizes(config: SFTConfig, train: DataProto, progress: Progress) -> None:
    num_examples = len(train) // (1 if config.dpo is None else 2)
    size, optimizer = config.data.train_batch_size, config.optimizer
    if size > num_examples:
        raise ConfigError(
            f"config key data.train_batch_size must be <= {num_examples}, the number of training examples, got {size}; "
            "lower it"
        )
    num_steps = train_batches(config, train).num_steps
    if optimizer.lr_warmup_steps > num_steps:
        progress.warn(
            f"optimizer.lr_warmup_steps={optimizer.lr_warmup_steps} is larger than the {num_steps} steps of the run: "
            "the learning rate never reaches optimizer.lr"
        )
    if optimizer.lr_scheduler != "constant" and optimizer.total_steps != num_steps:
        progress.warn(
            f"optimizer.total_steps={optimizer.total_steps} differs from the {num_steps} steps of the run: the "
            f'learning rate does not end where lr_scheduler="{optimizer.lr_scheduler}" does'
        )
