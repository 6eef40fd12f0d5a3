"""Run cases one after another on each rank of a group of processes."""

import gc
import os
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from tidemill_engines.throughput import known_peak_tflops, training_flops
from weight_update.supervisor import SendMessage

from engine.case import ENVIRONMENT, PATIENCE_S, Case, Effort
from engine.data import (
    LONGEST,
    SHORTEST,
    TINY_LONGEST,
    TINY_SHORTEST,
    count_outputs,
    divide_rows,
    make_batch,
    row_lengths,
    warm_up_rows,
)
from engine.head import compare_heads
from engine.profile import profiled
from engine.shapes import MODELS
from engine.subject import Subject, make_subject, write_config


def run_rank(
    rank: int, folder: str, send_message: SendMessage, cases: Sequence[Case], port: int, effort: Effort
) -> None:
    """Run cases with the same number of GPUs and environment, and report their results from rank 0.

    The process groups are not destroyed before the processes exit, as NCCL's groups may wait for one another.
    """
    os.environ |= cases[0].environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(cases[0].num_gpus),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    is_cuda = effort.device == "cuda"
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    report: SendMessage = send_message if rank == 0 else lambda kind, value: None
    report("fact", _facts(device))
    for number, case in enumerate(cases):
        report("begin", number)
        torch._dynamo.reset()  # otherwise new sizes cause slower kernels for dynamic sizes
        send_message("patience", PATIENCE_S)
        result, problem = {}, None
        try:
            result = _head(case, device) if "logprobs" in case.words else _train(case, folder, device, effort, report)
        except torch.OutOfMemoryError as error:
            problem = str(error).split(". ")[0]
        gc.collect()  # frees the tensors of the error's frames
        if is_cuda:
            torch.cuda.empty_cache()
        problems: list[Any] = [None] * case.num_gpus
        dist.all_gather_object(problems, problem)
        problem = next((item for item in problems if item is not None), None)
        report("result", {"number": number, "out_of_memory": problem} | ({} if problem else result))


def _train(case: Case, folder: str, device: torch.device, effort: Effort, report: SendMessage) -> dict[str, Any]:
    started = time.perf_counter()
    subject = make_subject(case, write_config(case.model, folder), device)
    try:
        return {"setup_s": time.perf_counter() - started} | _measure(case, subject, device, effort, started, report)
    finally:
        subject.close()


def _measure(
    case: Case, subject: Subject, device: torch.device, effort: Effort, started: float, report: SendMessage
) -> dict[str, Any]:
    shortest, longest = effort.rows or ((TINY_SHORTEST, TINY_LONGEST) if case.model == "tiny" else (SHORTEST, LONGEST))
    total = case.tokens * case.num_gpus  # constant work per GPU
    vocab_size, experts = MODELS[case.model]["vocab_size"], None
    if "balanced" in case.words:
        experts = tuple(
            MODELS[case.model][name] for name in ("num_hidden_layers", "num_experts", "num_experts_per_tok")
        )

    def rows(step: int) -> list[int]:
        return row_lengths(total, shortest=shortest, longest=longest, seed=0 if effort.repeats else step)

    def own(lengths: list[int]) -> list[int]:
        return divide_rows(lengths, subject.num_parts)[subject.part]

    few = warm_up_rows(own(rows(0)), case.micro_tokens)
    warm_up = make_batch(few, vocab_size, seed=subject.part, experts=experts)
    first_s, _ = _step(subject, warm_up, device)
    _step(subject, make_batch(own(rows(1)), vocab_size, seed=subject.part, experts=experts), device)
    if effort.profile:
        report("text", profiled(lambda: _step(subject, warm_up, device), device))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model, peak_tflops = _on_meta(case.model), known_peak_tflops(device, "bfloat16")
    steps, loss, peak = [], 0.0, 0
    while len(steps) < effort.steps:
        lengths = rows(2 + len(steps))
        batch = make_batch(own(lengths), vocab_size, seed=subject.part, experts=experts)
        taken, loss = _step(subject, batch, device)
        flops = training_flops(model, lengths, count_outputs(lengths)).total
        tokens, seconds = sum(lengths), _largest(taken)
        tflops = flops / seconds / case.num_gpus / 1e12
        steps.append({"step_s": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, "tflops": tflops})
        if device.type == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated(device))  # the engine resets it at each step
        if _largest(time.perf_counter() - started) > effort.case_s:
            break
    tflops = [step["tflops"] for step in steps]
    return {
        "first_s": first_s,
        "steps": steps,
        **{name: statistics.median(step[name] for step in steps) for name in ("step_s", "tokens_per_s", "tflops")},
        "tokens": sum(step["tokens"] for step in steps),
        "mfu": None if peak_tflops is None else statistics.median(tflops) / peak_tflops,
        "mfu_range": None if peak_tflops is None else (min(tflops) / peak_tflops, max(tflops) / peak_tflops),
        "peak_bytes": int(_largest(float(peak))) if device.type == "cuda" else None,
        "loss": loss,
        "expert_load": subject.expert_load,
    }


def _step(subject: Subject, batch: Any, device: torch.device) -> tuple[float, float]:
    """Run a step; return its seconds, from a barrier until this rank's device is idle, and the loss."""
    _synchronize(device)
    _largest(0.0)  # a barrier
    started = time.perf_counter()
    loss = subject.train(batch)
    _synchronize(device)
    return time.perf_counter() - started, loss


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def _on_meta(model: str) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(**MODELS[model])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def _head(case: Case, device: torch.device) -> dict[str, Any]:
    config = MODELS[case.model]
    tokens = 64 if case.model == "tiny" else 16384
    return compare_heads(tokens, config["hidden_size"], config["vocab_size"], device)


def _facts(device: torch.device) -> dict[str, Any]:
    import transformers

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if find_spec("transformer_engine") is not None:
        facts["transformer_engine"] = version("transformer_engine")
    if device.type != "cuda":
        return facts | {"device": "cpu"}
    import triton
    from tidemill_engines.attention.packed import HAS_CUDNN
    from torch.cuda import nccl

    gib = torch.cuda.get_device_properties(device).total_memory / (1 << 30)
    return facts | {
        "device": torch.cuda.get_device_name(device),
        "memory_gib": round(gib, 1),
        "triton": triton.__version__,
        "attention": "cuDNN" if HAS_CUDNN else "torch varlen",
        "nccl": ".".join(map(str, nccl.version())),
        "environment": " ".join(f"{name}={os.environ.get(name)}" for name in ENVIRONMENT),
    }
