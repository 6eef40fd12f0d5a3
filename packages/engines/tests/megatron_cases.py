"""What ranks of a Megatron model do in the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.config import ParallelConfig
from tidemill_engines.safetensors_files import SafetensorsFiles

LENGTHS = (5, 8, 3)


def packed_rows() -> torch.Tensor:
    """Token ids of some rows, one behind the other."""
    return torch.randint(3, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(7))


def check_layouts(layouts: Sequence[tuple[str, dict[str, Any]]]) -> tuple[dict[str, bool], list[dict[str, Any]]]:
    """On each of four ranks: `_redirections`, and for every (folder, sizes) what the rank saw."""
    from tidemill_engines.megatron.cpu import on_cpu

    redirections = _redirections()
    with on_cpu():
        return redirections, [_check(Path(folder), ParallelConfig(**sizes)) for folder, sizes in layouts]


def _redirections() -> dict[str, bool]:
    """Whether what megatron-core takes from torch is redirected before, during, between and after contexts."""
    import sys

    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from tidemill_engines.megatron.cpu import on_cpu

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
    from tidemill_engines.megatron.groups import close_groups, make_groups, own_placement
    from tidemill_engines.megatron.model import build_chunks, transformer_config
    from tidemill_engines.megatron.weights import MegatronWeights

    architecture = Architecture.read(folder)
    parallel.check(architecture, dist.get_world_size())
    make_groups(parallel, seed=1)
    config = transformer_config(architecture, parallel, torch.float32)
    chunks = build_chunks(architecture, config)
    weights = MegatronWeights(chunks, architecture, own_placement(), dist.group.WORLD)
    with SafetensorsFiles(folder) as files:
        read = _counted(files)
        weights.load(files)
    seen = {
        "read": sum(read),
        "held": sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()),
        "shards": list(weights.shards()),
        "full": dict(weights.full_tensors(torch.float32, bucket_bytes=20_000)),
        "logits": _logits(chunks, config, parallel),
    }
    close_groups()
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


def _logits(chunks: list[Any], config: Any, parallel: ParallelConfig) -> torch.Tensor | None:
    """Of packed rows, [tokens, vocabulary], on the ranks of the last pipeline stage."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from tidemill_engines.megatron.modules import own_positions

    cp, cp_rank = parallel.context_parallel_size, parallel_state.get_context_parallel_rank()
    multiple = 2 * cp if cp > 1 else 1
    padded = [-(-length // multiple) * multiple for length in LENGTHS]
    tp_multiple = parallel.tensor_model_parallel_size * multiple
    padded[-1] += -sum(padded) % tp_multiple
    rows = [
        torch.nn.functional.pad(row, (0, size - len(row)))
        for row, size in zip(packed_rows().split(LENGTHS), padded, strict=True)
    ]
    at = [own_positions(size, cp, cp_rank) for size in padded]
    ids = torch.cat([row[positions] for row, positions in zip(rows, at, strict=True)])[None]
    ends = torch.tensor([0, *padded]).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )

    def step(batches: Any, model: Any) -> Any:
        next(batches)
        out = model(ids, torch.cat(at)[None], None, packed_seq_params=packed)
        return out, lambda output, non_loss_data: output

    num_batches = parallel.pipeline_model_parallel_size
    batches = [iter(range(num_batches)) for _ in chunks]
    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=num_batches,
        seq_length=ids.shape[1],
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not parallel_state.is_pipeline_last_stage():
        return None
    # The last stage has no padding of its own and holds [1, tokens, part of the vocabulary].
    logits = tensor_parallel.gather_from_tensor_model_parallel_region(outputs[0].detach()).squeeze(0)
    whole = [torch.zeros(size, logits.shape[-1]) for size in padded]
    start = 0
    for out, positions in zip(whole, at, strict=True):
        out[positions] = logits[start : start + len(positions)]
        start += len(positions)
    joined = torch.cat(whole)
    dist.all_reduce(joined, group=parallel_state.get_context_parallel_group())
    return torch.cat([out[:length] for out, length in zip(joined.split(padded), LENGTHS, strict=True)])
