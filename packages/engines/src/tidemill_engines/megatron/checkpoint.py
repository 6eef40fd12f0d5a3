"""Checkpoints through Megatron's dist_checkpointing: sharded, and loadable under other parallel sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tidemill_engines.agreement import together
from tidemill_engines.checkpoint_folder import Progress, save_folder
from tidemill_engines.megatron.optimizer import torch_optimizers
from tidemill_engines.megatron.weights import unwrapped


class _TorchWriter(TorchDistSaveShardedStrategy):
    """Megatron's format by torch's writer. Megatron's own starts processes to write, which import all there is (15 s)
    and which a daemon may not have."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        state_dict_saver.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(
    path: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    progress: Progress,
    group: dist.ProcessGroup,
    *,
    keep_last: int | None,
) -> None:
    """Writes weights, optimizer state and random states to the new folder `path`, all or nothing. Collective.

    Raises:
        OSError: a rank could not write; raised on every rank.
    """

    def write(folder: Path) -> list[str]:
        rank = dist.get_rank(group)
        state = _sharded_state(chunks, optimizer, is_loading=False)
        dist_checkpointing.save(state, str(folder), _TorchWriter("torch_dist", 1))
        torch.save(_random_states(), folder / f"rng_{rank}.pt")
        common = [".metadata", "common.pt", "metadata.json"] if rank == 0 else []
        return [f"rng_{rank}.pt", *common, *(file.name for file in folder.glob(f"__{rank}_*"))]

    save_folder(path, write, progress, group, keep_last=keep_last)


def load(
    path: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    progress: Progress,
    group: dist.ProcessGroup,
) -> None:
    """Reads weights and optimizer state, and random states if as many ranks saved them. Collective.

    Raises:
        ValueError: the checkpoint is of another model, or of experts that were divided otherwise; raised on every rank.
    """
    with together(group):
        try:
            state: Any = dist_checkpointing.load(_sharded_state(chunks, optimizer, is_loading=True), str(path))
        except (CheckpointingException, CheckpointException, KeyError) as error:
            raise ValueError(
                f"could not load the checkpoint {path}: it is of another model, or of one whose experts were divided "
                f"otherwise, which megatron-core 0.16 cannot load: {error}"
            ) from error
        for name, chunk in _named(chunks).items():
            unwrapped(chunk).load_state_dict(state[name])
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
            _part_steps(optimizer)
        if progress.world_size == dist.get_world_size(group):
            states = torch.load(path / f"rng_{dist.get_rank(group)}.pt", weights_only=True)
            torch.set_rng_state(states.pop("cpu"))
            _tracker().set_states(states)


def _named(chunks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    return {"model" if len(chunks) == 1 else f"model{number}": chunk for number, chunk in enumerate(chunks)}


def _sharded_state(
    chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None, *, is_loading: bool
) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",  # others cannot be loaded under other sizes
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models: Any = {name: unwrapped(chunk) for name, chunk in _named(chunks).items()}
    state = {name: model.sharded_state_dict(metadata=metadata) for name, model in models.items()}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
    return state


def _part_steps(optimizer: MegatronOptimizer) -> None:
    """Megatron gives all parameters one tensor for Adam's step, which would then count each of them."""
    for each in torch_optimizers(optimizer):
        for state in each.state.values():
            state["step"] = state["step"].clone()


def _random_states() -> dict[str, torch.Tensor]:
    return {"cpu": torch.get_rng_state(), **_tracker().get_states()}


def _tracker() -> tensor_parallel.random.CudaRNGStatesTracker:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    assert tracker is not None
    return tracker
