"""Models and functions of the Megatron tests; the functions run on ranks."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.config import MegatronConfig


def check_layouts(layouts: Sequence[tuple[str, dict[str, Any]]]) -> tuple[dict[str, bool], list[dict[str, Any]]]:
    """Return, on each rank, the result of `_patch_states`, and that of `_check` for every (folder, sizes)."""
    from tidemill_engines.megatron.patches.context import apply_patches

    states = _patch_states()
    with apply_patches(torch.device("cpu")):
        return states, [_check(Path(folder), MegatronConfig(**sizes)) for folder, sizes in layouts]


def _patch_states() -> dict[str, bool]:
    """Whether megatron-core is patched inside of one context, inside of the second of two, and after both."""
    import sys

    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from tidemill_engines.megatron.patches.context import apply_patches

    def state() -> tuple[object, ...]:
        modules = {
            name: vars(module).get("torch") for name, module in sys.modules.items() if name.startswith("megatron.core")
        }
        methods = (
            torch.Tensor.cuda,
            torch.Tensor.type,
            vars(DistributedOptimizer)["_set_main_param_and_optimizer_states"],
        )
        return modules, methods, vars(random)["_get_cuda_rng_state"]

    device = torch.device("cpu")
    with apply_patches(device):
        pass  # imports the modules to patch
    before = state()
    outer, inner = apply_patches(device), apply_patches(device)
    outer.__enter__()
    in_one = state() != before
    inner.__enter__()
    outer.__exit__(None, None, None)
    in_second = state() != before
    inner.__exit__(None, None, None)
    return {"in one": in_one, "in second": in_second, "after both": state() != before}


def _check(folder: Path, parallel: MegatronConfig) -> dict[str, Any]:
    from tidemill_engines.megatron.model.build import build_chunks, transformer_config
    from tidemill_engines.megatron.parallel.groups import close_groups, make_groups, own_placement
    from tidemill_engines.megatron.weights.hf_weights import MegatronWeights

    architecture = Architecture.read(folder)
    parallel.check_architecture(architecture, dist.get_world_size())
    groups = make_groups(parallel, torch.device("cpu"), lambda world_size: None, seed=1, timeout_s=60)
    config = transformer_config(architecture, parallel, torch.float32)
    chunks = build_chunks(architecture, config)
    weights = MegatronWeights(chunks, architecture, own_placement(), dist.group.WORLD)
    with SafetensorsFiles(folder) as files:
        read = _count_reads(files)
        weights.load(files)
    own = {p.untyped_storage().data_ptr() for chunk in chunks for p in chunk.parameters()}
    result = {
        "read": sum(read),
        "held": sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()),
        "shards": list(weights.shards()),
        "are_views": all(shard.tensor.untyped_storage().data_ptr() in own for _, shard in weights.shards()),
        "sizes": weights.sizes_bytes(torch.float32),
        "full": dict(weights.full_tensors(torch.float32, bucket_bytes=20_000)),
    }
    close_groups(groups)
    return result


def _count_reads(files: SafetensorsFiles) -> list[int]:
    """Return a list to which every later read appends its number of elements."""
    counts: list[int] = []
    read = files.read

    def counted(name: str, region: tuple[slice, ...]) -> torch.Tensor:
        tensor = read(name, region)
        counts.append(tensor.numel())
        return tensor

    files.read = counted  # type: ignore[method-assign]
    return counts


def make_engine(folder: str, sizes: dict[str, Any], **others: Any) -> Any:
    from engine_cases import build_engine

    return build_engine(folder, backend="megatron", optimizer=OPTIMIZER, **sizes, **others)


def own_rows(engine: Any) -> Any:
    """This rank's rows of the batch that all tests use."""
    from engine_cases import make_batch

    size, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    return make_batch(NUM_ROWS, temperature=0.8)[rank * NUM_ROWS // size : (rank + 1) * NUM_ROWS // size]


def save_and_load(
    folder: str, target: str, layouts: Sequence[dict[str, Any]], others: dict[str, Any], bucket_size: int | None = None
) -> dict[str, Any]:
    """Run three steps with the first layout, saved after the first; repeat the last two with every layout.

    Args:
        bucket_size: elements of Megatron's buckets for overlapped gradients; by default 40 million.

    Returns:
        metrics and weights after the uninterrupted steps, then after loading with each layout.
    """
    from engine_cases import policy_like_loss
    from tidemill_engines.megatron.parallel import data_parallel

    if bucket_size is not None:
        config = data_parallel.DistributedDataParallelConfig
        data_parallel.DistributedDataParallelConfig = partial(config, bucket_size=bucket_size)  # type: ignore[misc]

    def steps(engine: Any, num_steps: int) -> list[dict[str, float]]:
        return [
            engine.train_batch(own_rows(engine), policy_like_loss, calculate_entropy=True) for _ in range(num_steps)
        ]

    engine = make_engine(folder, layouts[0], **others)
    engine.save_checkpoint(f"{target}/step_0")  # also possible before any step
    steps(engine, 1)
    engine.save_checkpoint(f"{target}/step_1")
    results = {"metrics": [steps(engine, 2)], "weights": [dict(engine.get_per_tensor_param())]}
    engine.save_hf(f"{target}/hf")
    engine.close()
    for layout in layouts:
        engine = make_engine(folder, layout, **others)
        engine.load_checkpoint(f"{target}/step_1")
        results["metrics"].append(steps(engine, 2))
        results["weights"].append(dict(engine.get_per_tensor_param()))
        engine.close()
    return results


def check_resumed(results: Sequence[dict[str, Any]], exported: Path) -> None:
    """Check each rank's result of `save_and_load`.

    Training resumes bitwise in the layout that saved, and to float32 precision in others; exported weights are equal.
    """
    for result in results:
        expected, same, *others = zip(result["metrics"], result["weights"], strict=True)
        assert same[0] == expected[0]
        assert all(torch.equal(same[1][name], weight) for name, weight in expected[1].items())
        for metrics, weights in others:
            for step, wanted in zip(metrics, expected[0], strict=True):
                assert step == pytest.approx(wanted, rel=1e-4, abs=1e-5)
            for name, weight in expected[1].items():
                torch.testing.assert_close(weights[name], weight, atol=2e-5, rtol=1e-4, msg=name)
        written = load_file(exported / "model.safetensors")
        assert set(written) == set(expected[1])
        assert all(torch.equal(written[name], weight) for name, weight in expected[1].items())


OPTIMIZER = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1, "clip_grad": 0.5, "decay_norms_and_biases": False}
NUM_ROWS = 6


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 16,
}


def deepseek(path: Path, *, num_dense: int = 1, **fields: Any) -> Path:
    """Create a tiny model whose routers have a bias and whose first layers have no experts."""
    import transformers
    from engine_cases import VOCAB

    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=4,
        first_k_dense_replace=num_dense,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        max_position_embeddings=64,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        **fields,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.DeepseekV3ForCausalLM(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(path)
    return path
