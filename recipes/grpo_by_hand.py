"""GRPO in one file: four packages composed by hand, without the trainer: `uv run python recipes/grpo_by_hand.py`.

A tiny Qwen3 with random weights receives a number and earns reward for answering with numbers of the same parity.
Two FSDP2 ranks (Ray actors) train it and a stock SGLang server samples, on CPUs, in about a minute.
"""

import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager

import ray
import requests
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_dispatch import Dispatch, Worker, register, split_over
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tidemill_engines import EngineRegistry, FSDP2Config, ModelConfig, ModelOutput, Normalizer, OptimizerConfig
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.sglang import HttpEngine
from transformers import Qwen3Config, Qwen3ForCausalLM

NUM_STEPS, NUM_PROMPTS, GROUP_SIZE, RESPONSE_LENGTH, VOCAB = 30, 16, 8, 8, 64


def grpo_loss(output: ModelOutput, batch: DataProto, normalizer: Normalizer) -> tuple[torch.Tensor, dict]:
    """Return PPO's clipped loss, a mean over the response tokens of the global batch. Tensors are flat, [tokens]."""
    advantages = batch["advantages"].values()
    log_ratio = output.log_probs - batch["rollout_log_probs"].values()
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / normalizer.num_tokens
    return loss, {"log_prob_difference": log_ratio.detach().abs().sum() / normalizer.num_tokens}


class Actor(Worker):
    """One FSDP2 rank of the policy, in a Ray actor."""

    def __init__(self, path: str) -> None:
        configs = {"model": ModelConfig(path=path), "engine": FSDP2Config(), "optimizer": OptimizerConfig(lr=2e-3)}
        self.engine = EngineRegistry.new(model_type="language_model", backend="fsdp2", **configs)

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, url: str) -> None:
        self.engine.initialize()
        self.register_dispatch_collect_info("actor", dp_rank=self.engine.get_data_parallel_rank(), is_collect=True)
        self.updater = WeightUpdater([HttpEngine(url)] if self.rank == 0 else [])

    @register(split_over("actor"))  # splits the rows over the ranks
    def update_policy(self, batch: DataProto) -> dict[str, float]:
        return self.engine.train_batch(batch, grpo_loss)

    @register(Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> None:
        self.updater.update(list(self.engine.get_per_tensor_param()), weight_version=version)


@contextmanager
def sglang_server(path: str):
    """Run a stock SGLang server that accepts weight updates; yield its URL."""
    port, nccl_port = random.sample(range(20000, 30000), 2)  # outside the ports that the system hands out meanwhile
    options = f"--model-path {path} --port {port} --nccl-port {nccl_port} --dtype float32 --log-level warning"
    options += " --max-total-tokens 8192 --skip-tokenizer-init --skip-server-warmup --sleep-on-idle"
    options += " --enable-deterministic-inference"
    options += " --custom-weight-loader tidemill_weight_update.sglang.loader.load"
    server = subprocess.Popen([sys.executable, "-m", "sglang.launch_server", *options.split()])
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert server.poll() is None, "the SGLang server exited during its start; see its output above"
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=60)


def generate(url: str, prompts: torch.Tensor, version: int) -> DataProto:
    """Sample a response to each of `prompts` [B, 1] with the weights of `version`, and score it."""
    common = {"temperature": 1.0, "max_new_tokens": RESPONSE_LENGTH, "ignore_eos": True}
    sampling = [common | {"sampling_seed": version * len(prompts) + row} for row in range(len(prompts))]
    body = {"input_ids": prompts.tolist(), "sampling_params": sampling, "return_logprob": True}
    rows = [row["meta_info"] for row in requests.post(f"{url}/generate", json=body, timeout=60).json()]
    assert {row["weight_version"] for row in rows} == {str(version)}
    log_probs = torch.tensor([[token[0] for token in row["output_token_logprobs"]] for row in rows])
    tokens = torch.tensor([[token[1] for token in row["output_token_logprobs"]] for row in rows])
    rewards = (tokens % 2 == prompts % 2).float().mean(1).view(-1, GROUP_SIZE)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    responses = ragged.ragged_from_list(list(tokens))
    input_ids = ragged.concat_rows(ragged.ragged_from_list(list(prompts)), responses)
    columns = {"responses": responses, "input_ids": input_ids, "rewards": rewards.flatten()}
    columns["response_mask"] = ragged.like(torch.ones(tokens.numel()), responses)
    columns["rollout_log_probs"] = ragged.like(log_probs.flatten(), responses)
    columns["advantages"] = ragged.like(ragged.expand_rows(advantages.flatten(), responses), responses)
    return DataProto.from_dict(columns)


def main(path: str) -> None:
    torch.manual_seed(0)
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": VOCAB}
    Qwen3ForCausalLM(Qwen3Config(**tiny, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(path)
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    actors = RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Actor, path), name_prefix="actor")
    with actors, sglang_server(path) as url:
        actors.init_model(url)
        actors.update_weights(0)
        for step in range(1, NUM_STEPS + 1):
            prompts = torch.randint(VOCAB, (NUM_PROMPTS, 1)).repeat_interleave(GROUP_SIZE, 0)
            batch = generate(url, prompts, version=step - 1)
            difference = actors.update_policy(batch)[0]["log_prob_difference"]
            assert difference < 1e-4, "rollout and training compute different log-probs"
            actors.update_weights(step)
            print(f"step {step:2d}: reward {batch['rewards'].mean():.2f}, log-prob difference {difference:.1e}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
