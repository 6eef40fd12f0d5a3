"""A `transformers.Trainer` callback: after every `every` optimizer steps, a running SGLang server has the new weights.

    python -m sglang.launch_server --model-path MODEL --port 30000 --api-key KEY \
        --custom-weight-loader tidemill_weight_update.sglang.loader.load &
    pip install accelerate  # for transformers.Trainer
    python transformers_callback.py MODEL http://127.0.0.1:30000 KEY OUTPUT

With `torchrun` the same file trains on several ranks (DDP); rank 0 then sends.
"""

import sys

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
        if state.global_step % self.every == 0:  # each rank calls `update`
            stats = self.updater.update(list(model.named_parameters()), weight_version=state.global_step)
            if state.is_world_process_zero:
                print(f"version {stats.weight_version} after {stats.seconds:.3f} s, verified: {stats.verified}")

    def on_train_end(self, args, state, control, **kwargs):
        self.updater.close()


class RandomTokens(Dataset):
    """Random tokens; replace by your data."""

    def __init__(self, vocab_size: int) -> None:
        self.tokens = torch.randint(vocab_size, (64, 32))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(path: str, url: str, api_key: str, output: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    on_cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(output, max_steps=4, learning_rate=1e-3, report_to="none", use_cpu=on_cpu)
    callback = UpdateWeights([HttpEngine(url, api_key)] if arguments.process_index == 0 else [], every=2)
    data = RandomTokens(model.config.vocab_size)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
