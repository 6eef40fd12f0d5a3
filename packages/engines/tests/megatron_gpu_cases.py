"""Training with the Megatron engine on GPUs; the functions run on ranks."""

import sys
from pathlib import Path
from typing import Any

import torch
from engine_cases import VOCAB, build_engine, make_batch, trained_on
from tidemill_testing import tiny_model

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
SP = {"sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
OFFLOAD_ALL = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
RECOMPUTE = {"gradient_checkpointing": True}
SELECTIVE = {"gradient_checkpointing": True, "recompute": "selective"}
Case = tuple[str, dict[str, Any], dict[str, Any]]
"""Family, configuration of the engine, and of the model."""


def make_models(folder: Path) -> dict[str, Path]:
    """Models of four layers; Qwen2's embeddings are tied."""
    return {
        family: tiny_model(
            folder / family, family, num_hidden_layers=4, vocab_size=VOCAB, tie_word_embeddings=family == "qwen2"
        )
        for family in ("qwen2", "qwen3", "qwen3_moe")
    }


def batches() -> list[Any]:
    return [make_batch(9, seed=1, temperature=0.8), make_batch(7, seed=2, temperature=0.8)]


def engine_on_gpu(folder: str | Path, engine: dict[str, Any], model: dict[str, Any], **settings: Any) -> Any:
    return build_engine(folder, backend="megatron", device="cuda", model=model, **engine, **settings)


def join_gpus(store: str) -> None:
    """Replace the default process group of the tests by one with NCCL."""
    import os

    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=world_size)


def train(store: str, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Return the result of `trained` for each case."""
    join_gpus(store)
    return [trained(*case) for case in cases]


def trained(folder: str, settings: dict[str, Any], model: dict[str, Any]) -> Any:
    """Return metrics and weights like `plain_training`, GPU memory offloaded and onloaded, and the performance."""
    print(f"case {settings} {model}", file=sys.stderr, flush=True)
    engine = engine_on_gpu(folder, settings, model)
    history, weights = trained_on(engine, batches())
    weights = {name: weight.float().cpu() for name, weight in weights.items()}
    offloaded = torch.cuda.memory_allocated()
    with engine.train_mode():
        onloaded = torch.cuda.memory_allocated()
    performance = engine.performance()
    engine.close()
    return history, weights, offloaded, onloaded, performance
