"""TRL's `GRPOTrainer` with completions from a running SGLang server that has the policy of the current step.

    pip install "trl==1.16.0"
    python -m sglang.launch_server --model-path MODEL --port 30000 --api-key KEY \
        --custom-weight-loader tidemill_weight_update.sglang.loader.load &
    python trl_grpo.py MODEL http://127.0.0.1:30000 KEY OUTPUT

It uses TRL's argument `rollout_func`, which TRL calls on each rank for new completions, also with `torchrun` (DDP).
"""

import json
import sys
import urllib.request

import torch
from datasets import Dataset
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.sglang import HttpEngine
from trl import GRPOConfig, GRPOTrainer


class SglangRollout:
    """A `rollout_func`: updates the server if the policy has changed, then samples a completion for each prompt."""

    def __init__(self, url: str, api_key: str, *, is_first_rank: bool) -> None:
        self.url, self.api_key = url, api_key
        self.updater = WeightUpdater([HttpEngine(url, api_key)] if is_first_rank else [])
        self.version = -1

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        if trainer.state.global_step != self.version:
            self.version = trainer.state.global_step
            stats = self.updater.update(list(trainer.model.named_parameters()), weight_version=self.version)
            if trainer.is_world_process_zero():
                print(f"version {stats.weight_version} after {stats.seconds:.3f} s, verified: {stats.verified}")
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]  # TRL repeats a prompt for each of its samples
        answers = self.generate(prompt_ids, trainer.args.temperature, trainer.args.max_completion_length)
        log_probs = [[log_prob for log_prob, *_ in a["meta_info"]["output_token_logprobs"]] for a in answers]
        completion_ids = [answer["output_ids"] for answer in answers]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": log_probs}

    def generate(self, prompt_ids: list[list[int]], temperature: float, max_new_tokens: int) -> list[dict]:
        sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        body = json.dumps({"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True}).encode()
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/generate", body, headers)) as response:
            return json.load(response)


def numbers(completions: list[str], **kwargs) -> list[float]:
    """Reward: fraction of words that are numbers; replace by your own."""
    return [sum(map(str.isdigit, text.split())) / max(1, len(text.split())) for text in completions]


def main(path: str, url: str, api_key: str, output: str) -> None:
    on_gpu = torch.cuda.is_available()
    arguments = GRPOConfig(
        output, max_steps=20, learning_rate=2e-3, per_device_train_batch_size=32, max_completion_length=16,
        use_cpu=not on_gpu, bf16=on_gpu, gradient_checkpointing=False, logging_steps=1, report_to="none",
    )  # fmt: skip
    rollout = SglangRollout(url, api_key, is_first_rank=arguments.process_index == 0)
    prompts = Dataset.from_dict({"prompt": [f"{i} {i + 1} {i + 2}" for i in range(100)]})  # replace by your data
    trainer = GRPOTrainer(path, numbers, arguments, train_dataset=prompts, rollout_func=rollout)
    trainer.train()
    rollout.updater.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
