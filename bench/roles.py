"""Time and memory of a training step with a reference and a critic, next to one with the policy alone.

    python bench/roles.py --model 0.6b            one GPU
    python bench/roles.py --model tiny            seconds, on a CPU

A step is the log-probs of the policy, advantages, and one optimizer step; a reference adds its log-probs, a critic its
values and its own optimizer step. All are engines of one process, a new one for each case. Rows have 512 to 4,096
tokens, log-uniform, and are new in each step; weights are random. A forward pass more should cost less than 1.35 times
the step of the policy. Peak memory is that of torch's allocator on a GPU, and that of the whole process on a CPU.
"""

import argparse
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

import torch
from engine.data import make_batch, row_lengths
from engine.shapes import MODELS
from engine.subject import write_config
from tidemill_algorithms import ADV_ESTIMATORS, ActorLoss, CriticLoss, token_weights
from tidemill_dataproto import DataProto
from tidemill_engines import BaseEngine, EngineRegistry, FSDP2Config, ModelConfig, OptimizerConfig

CASES = ((), ("reference",), ("critic",), ("reference", "critic"))


def build(path: Path, role: str, *, is_tiny: bool, max_tokens: int) -> BaseEngine:
    engine = EngineRegistry.new(
        model_type="value_model" if role == "critic" else "language_model",
        backend="fsdp2",
        model=ModelConfig(path=str(path), init_seed=0),
        engine=FSDP2Config(
            param_dtype="float32" if is_tiny else "bfloat16",
            max_token_len_per_gpu=max_tokens,
            reshard_after_forward=False,
        ),
        optimizer=None if role == "reference" else OptimizerConfig(lr=1e-6),
    )
    engine.initialize()
    return engine


class Step:
    """One training step on a batch.

    Args:
        engines: engines by role, with "policy".
    """

    def __init__(self, engines: dict[str, BaseEngine], device: torch.device) -> None:
        self._engines = engines
        self._device = device
        self._loss = ActorLoss(kl_loss_coef=0.001 if "reference" in engines else 0.0)
        self._seconds: dict[str, list[float]] = {}

    def run(self, batch: DataProto) -> None:
        engines, began = self._engines, time.perf_counter()
        columns = {"old_log_probs": self._timed("policy forward", lambda: self._infer("policy", batch))}
        if "reference" in engines:
            columns["ref_log_prob"] = self._timed("reference forward", lambda: self._infer("reference", batch))
        if "critic" in engines:
            columns["values"] = self._timed("critic forward", lambda: self._infer("critic", batch))
        batch = self._timed("advantages", lambda: self._prepare(batch.union(DataProto.from_dict(columns))))
        if "critic" in engines:
            self._timed("critic update", lambda: engines["critic"].train_batch(batch, CriticLoss()))
        self._timed("policy update", lambda: engines["policy"].train_batch(batch, self._loss))
        self._seconds.setdefault("step", []).append(time.perf_counter() - began)

    def _infer(self, role: str, batch: DataProto) -> torch.Tensor:
        column = "values" if role == "critic" else "log_probs"
        return self._engines[role].infer_batch(batch)[column]

    def _prepare(self, batch: DataProto) -> DataProto:
        estimator = "gae" if "critic" in self._engines else "grpo"
        uid = [str(row // 8) for row in range(len(batch))]
        rewards = torch.rand(len(batch), generator=torch.Generator().manual_seed(0))
        batch = batch.union(DataProto.from_dict({"rewards": rewards}, {"uid": uid}))
        weights = {"loss_weights": token_weights(batch["response_mask"], "token-mean")}
        return batch.union(DataProto.from_dict(dict(ADV_ESTIMATORS[estimator](batch)) | weights))

    def _timed(self, name: str, call: Callable):
        began = time.perf_counter()
        result = call()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def medians(self, skipped: int) -> dict[str, float]:
        return {name: statistics.median(values[skipped:]) for name, values in self._seconds.items()}


def measure(case: tuple[str, ...], path: Path, args: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Return the median seconds of each part, and the peak memory in GiB."""
    is_tiny = args.model == "tiny"
    max_tokens = 256 if is_tiny else 32768
    engines = {role: build(path, role, is_tiny=is_tiny, max_tokens=max_tokens) for role in ("policy", *case)}
    device = engines["policy"].device
    step = Step(engines, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    shortest, longest = (8, 64) if is_tiny else (512, 4096)
    for seed in range(args.steps + 2):
        lengths = row_lengths(args.tokens, shortest=shortest, longest=longest, seed=seed)
        step.run(make_batch(lengths, MODELS[args.model]["vocab_size"], seed=seed))
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else _peak_resident()
    for engine in engines.values():
        engine.close()
    return step.medians(skipped=2), memory


def _peak_resident() -> float:
    """Return the peak memory of this process in GiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="0.6b")
    parser.add_argument("--tokens", type=int, default=None, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=8, help="measured steps, after two others")
    args = parser.parse_args()
    args.tokens = (2048 if args.model == "tiny" else 262_144) if args.tokens is None else args.tokens
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.model}, {args.tokens} tokens a step, median of {args.steps} steps, FSDP2; {device}")
    print(f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, transformers {version('transformers')}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(args.model, folder)
        alone = None
        for case in CASES:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                seconds, memory = process.submit(measure, case, path, args).result()
            alone = seconds if alone is None else alone
            parts = "  ".join(f"{name} {value:.3f}" for name, value in seconds.items() if name != "step")
            ratio = seconds["step"] / alone["step"]
            print(
                f"policy{''.join(f' + {role}' for role in case)}: step {seconds['step']:.3f} s, {ratio:.2f}x, "
                f"peak {memory:.2f} GiB\n    {parts}",
                flush=True,
            )


if __name__ == "__main__":
    main()
