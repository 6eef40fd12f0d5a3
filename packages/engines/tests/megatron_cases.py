"""What ranks of a Megatron model do in the tests."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.config import ParallelConfig


def check_layouts(layouts: Sequence[tuple[str, dict[str, Any]]]) -> tuple[dict[str, bool], list[dict[str, Any]]]:
    """On each of four ranks: `_redirections`, and for every (folder, sizes) what the rank saw."""
    from tidemill_engines.megatron.patches.cpu import on_cpu

    redirections = _redirections()
    with on_cpu():
        return redirections, [_check(Path(folder), ParallelConfig(**sizes)) for folder, sizes in layouts]


def _redirections() -> dict[str, bool]:
    """Whether what megatron-core takes from torch is redirected before, during, between and after contexts."""
    import sys

    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from tidemill_engines.megatron.patches.cpu import on_cpu

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

    with on_cpu():
        pass  # imports what it needs
    before = state()
    outer, inner = on_cpu(), on_cpu()
    outer.__enter__()
    redirected = state() != before
    inner.__enter__()
    outer.__exit__(None, None, None)
    still = state() != before
    inner.__exit__(None, None, None)
    return {"in one": redirected, "until the last is closed": still, "not after it": state() == before}


def _check(folder: Path, parallel: ParallelConfig) -> dict[str, Any]:
    from tidemill_engines.megatron.model.build import build_chunks, transformer_config
    from tidemill_engines.megatron.parallel.groups import close_groups, make_groups, own_placement
    from tidemill_engines.megatron.weights.hf_weights import MegatronWeights

    architecture = Architecture.read(folder)
    parallel.check(architecture, dist.get_world_size())
    groups = make_groups(parallel, torch.device("cpu"), lambda world_size: None, seed=1, timeout_s=60)
    config = transformer_config(architecture, parallel, torch.float32)
    chunks = build_chunks(architecture, config)
    weights = MegatronWeights(chunks, architecture, own_placement(), dist.group.WORLD)
    with SafetensorsFiles(folder) as files:
        read = _counted(files)
        weights.load(files)
    own = {p.untyped_storage().data_ptr() for chunk in chunks for p in chunk.parameters()}
    seen = {
        "read": sum(read),
        "held": sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()),
        "shards": list(weights.shards()),
        "are_views": all(shard.tensor.untyped_storage().data_ptr() in own for _, shard in weights.shards()),
        "sizes": weights.sizes_bytes(torch.float32),
        "full": dict(weights.full_tensors(torch.float32, bucket_bytes=20_000)),
    }
    close_groups(groups)
    return seen


def _counted(files: SafetensorsFiles) -> list[int]:
    """The numbers of elements that are read from now on."""
    counts: list[int] = []
    read = files.read

    def counted(name: str, region: tuple[slice, ...]) -> torch.Tensor:
        tensor = read(name, region)
        counts.append(tensor.numel())
        return tensor

    files.read = counted  # type: ignore[method-assign]
    return counts


def make_engine(folder: str, parallel: ParallelConfig, **others: Any) -> Any:
    from tidemill_engines import EngineRegistry, ModelConfig, OptimizerConfig
    from tidemill_engines.megatron.config import MegatronConfig

    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model=ModelConfig(path=folder),
        engine=MegatronConfig(device="cpu", **asdict(parallel), **others),
        optimizer=OptimizerConfig(**OPTIMIZER),
    )
    engine.initialize()
    return engine


def own_rows(engine: Any) -> Any:
    """This rank's rows of the batch of all tests."""
    from engine_cases import make_batch

    size, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    return make_batch(NUM_ROWS, temperature=0.8)[rank * NUM_ROWS // size : (rank + 1) * NUM_ROWS // size]


def save_and_load(
    folder: str, target: str, layouts: Sequence[dict[str, Any]], others: dict[str, Any], bucket_size: int | None = None
) -> dict[str, Any]:
    """Three steps under the first layout, saved after the first; the last two again under every layout.

    Args:
        bucket_size: of Megatron's buckets for overlapped gradients, which have 40 million parameters else.

    Returns:
        metrics and weights of the uninterrupted steps, and of those after loading under each layout.
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

    engine = make_engine(folder, ParallelConfig(**layouts[0]), **others)
    engine.save_checkpoint(f"{target}/step_0")  # before any step, too
    steps(engine, 1)
    engine.save_checkpoint(f"{target}/step_1")
    seen = {"metrics": [steps(engine, 2)], "weights": [dict(engine.get_per_tensor_param())]}
    engine.save_hf(f"{target}/hf")
    engine.close()
    for layout in layouts:
        engine = make_engine(folder, ParallelConfig(**layout), **others)
        engine.load_checkpoint(f"{target}/step_1")
        seen["metrics"].append(steps(engine, 2))
        seen["weights"].append(dict(engine.get_per_tensor_param()))
        engine.close()
    return seen


def check_goes_on(results: Sequence[dict[str, Any]], exported: Path) -> None:
    """Of what each rank saw in `save_and_load`: that training goes on bit for bit where it was saved, and elsewhere to
    float32's precision; and that its weights are those exported."""
    for seen in results:
        expected, same, *elsewhere = zip(seen["metrics"], seen["weights"], strict=True)
        assert same[0] == expected[0]
        assert all(torch.equal(same[1][name], weight) for name, weight in expected[1].items())
        for metrics, weights in elsewhere:
            for step, wanted in zip(metrics, expected[0], strict=True):
                assert step == pytest.approx(wanted, rel=1e-4, abs=1e-5)
            for name, weight in expected[1].items():
                torch.testing.assert_close(weights[name], weight, atol=2e-5, rtol=1e-4, msg=name)
        written = load_file(exported / "model.safetensors")
        assert set(written) == set(expected[1])
        assert all(torch.equal(written[name], weight) for name, weight in expected[1].items())


OPTIMIZER = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1, "clip_grad": 0.5, "decay_norms_and_biases": False}
NUM_ROWS = 6
