"""The tokenizer of a run."""

from pathlib import Path

from tidemill_engines.config import ModelConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tidemill_trainer.config_file import ConfigError


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer in the folder of the model.

    Raises:
        ConfigError: it cannot be loaded, or has no end token.
    """
    path = Path(model.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # tokenizers raises a plain Exception for a damaged file
        raise ConfigError(f"config key model.path: cannot load a tokenizer from {path}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"config key model.path: the tokenizer in {path} has no end token; set eos_token in tokenizer_config.json"
        )
    return tokenizer
