"""Checkpoints through Megatron's dist_checkpointing: sharded, and loadable under other parallel sizes."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from tidemill_engines.agreement import together
from tidemill_engines.checkpoint_folder import Progress, save_folder, write_object, write_tensors
from tidemill_engines.megatron.optimizer import torch_optimizers
from tidemill_engines.megatron.weights import unwrapped


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Content:
    """What this rank has to save.

    Attributes:
        sharded: tensors and objects with their places in those of the whole model, as torch's writer takes them.
        common: what is the same on all ranks.
        random: random states.
    """

    sharded: dict[str, Any]
    common: dict[str, Any]
    random: dict[str, torch.Tensor]


def collect(
    chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None, device: torch.device, *, copied: bool
) -> Content:
    """Weights, optimizer state and random states. Collective over all ranks.

    Args:
        copied: have copies on the CPU, so that saving them need not stop the training that goes on.
    """
    sharded: Any
    sharded, common = save_preprocess(_sharded_state(chunks, optimizer, is_loading=False))
    state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    if copied:
        for part in (part for parts in state.values() for part in parts if isinstance(part, ShardedTensor)):
            assert part.data is not None
            part.data = part.data.detach().to("cpu", copy=True)
        common = copy.deepcopy(common)
    return Content(sharded=mcore_to_pyt_state_dict(state, False), common=common, random=_random_states(device))


def save(path: Path, content: Content, progress: Progress, group: dist.ProcessGroup, *, keep_last: int | None) -> None:
    """Writes to the new folder `path`, all or nothing. Collective over `group` (gloo).

    The format is Megatron's, the writer torch's: Megatron's own starts processes to write, which import all there is
    (15 s) and which a daemon may not have.

    Raises:
        OSError: a rank could not write; raised on every rank.
    """

    def write(folder: Path) -> list[str]:
        rank = dist.get_rank(group)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        write_tensors(folder, content.sharded, group, planner)
        write_object(folder / f"rng_{rank}.pt", content.random)
        written = [f"rng_{rank}.pt", *(file.name for file in folder.glob(f"__{rank}_*"))]
        if rank == 0:
            write_object(folder / "common.pt", content.common)
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))
            written += [".metadata", "common.pt", "metadata.json"]
        return written

    save_folder(path, write, progress, group, keep_last=keep_last)


def load(
    path: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    progress: Progress,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Reads weights and optimizer state, and random states if as many ranks saved them on such devices. Collective.

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
            model = unwrapped(chunk)
            model.load_state_dict({**_extra_states(model.state_dict()), **state[name]})
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
            _part_steps(optimizer)
        if progress.world_size == dist.get_world_size(group):
            states = torch.load(path / f"rng_{dist.get_rank(group)}.pt", weights_only=True)
            if ("cuda" in states) == (device.type == "cuda"):
                _set_random_states(states, device)


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
    for parts in state.values():
        for name in _extra_states(parts):
            del parts[name]
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
    return state


def _extra_states(state: dict[str, Any]) -> dict[str, Any]:
    """What Transformer Engine's modules, and Megatron's for their sake, have beside weights for FP8: nothing here."""
    return {name: part for name, part in state.items() if "_extra_state" in name}


def _part_steps(optimizer: MegatronOptimizer) -> None:
    """Megatron gives all parameters one tensor for Adam's step, which would then count each of them."""
    for each in torch_optimizers(optimizer):
        for param, state in each.state.items():
            state["step"] = state["step"].to(param.device, copy=True)


def _random_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state(), **_tracker().get_states()}
    return {**states, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def _set_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states.pop("cpu"))
    if device.type == "cuda":
        torch.cuda.set_rng_state(states.pop("cuda"), device)
    _tracker().set_states(states)


def _tracker() -> tensor_parallel.random.CudaRNGStatesTracker:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    assert tracker is not None
    return tracker
