"""A `transformers.Trainer` callback that updates a running SGLang server during training.

Start the server as described in `fsdp2.py`, then run: python hf_trainer.py MODEL http://127.0.0.1:30000 KEY
"""

import sys
import tempfile

import torch
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.sglang import HttpEngine
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class UpdateWeights(TrainerCallback):
    """Sends the weights after every `every` optimizer steps. Pass `engines` on rank 0 and an empty list elsewhere."""

    def __init__(self, engines: list[HttpEngine], every: int = 1) -> None:
        self.updater = WeightUpdater(engines)
        self.every = every

    def on_step_end(self, args, state, control, *, model, **kwargs):
        if state.global_step % self.every == 0:
            stats = self.updater.update(list(model.named_parameters()), weight_version=state.global_step)
            print(f"version {stats.weight_version} after {stats.seconds:.3f} s, verified: {stats.verified}")

    def on_train_end(self, args, state, control, **kwargs):
        self.updater.close()


class RandomTokens(Dataset):
    """Random tokens; replace by your data."""

    def __init__(self, vocab_size: int) -> None:
        self.tokens = torch.randint(vocab_size, (24, 32))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(path: str, url: str, api_key: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, max_steps=3, report_to="none", save_strategy="no")
        callbacks = [UpdateWeights([HttpEngine(url, api_key)])]
        Trainer(model, arguments, train_dataset=RandomTokens(model.config.vocab_size), callbacks=callbacks).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
