"""Checkpoints in Megatron's dist_checkpointing format: sharded, and loadable with other parallel sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tidemill_engines.checkpoint.folder import Progress, reasons, save_folder, write_object, write_tensors
from tidemill_engines.checkpoint.host_memory import host_copies
from tidemill_engines.distributed.agreement import all_gather, raise_on_all_ranks
from tidemill_engines.megatron import optimizer_state
from tidemill_engines.megatron.weights.hf_weights import unwrapped

_OPTIMIZER = "optimizer."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Content:
    """Content of a checkpoint on this rank.

    Attributes:
        sharded: tensors and objects with their position in the whole model, in the format of torch's writer.
        common: values that are the same on all ranks.
        random: random states.
    """

    sharded: dict[str, Any]
    common: dict[str, Any]
    random: dict[str, torch.Tensor]


def collect(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer | None,
    vocab_size: int,
    device: torch.device,
    *,
    copied: bool,
) -> Content:
    """Collect weights, optimizer state and random states. Collective over all ranks.

    Args:
        vocab_size: vocabulary of the model; its embedding may have more rows, to be divisible by tensor-parallel ranks.
        copied: copy tensors to the CPU, so that training can continue while they are saved.
    """
    sharded: Any
    sharded, common = save_preprocess(_sharded_state(chunks, optimizer, is_loading=False))
    state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    if copied:
        parts = [part for each in state.values() for part in each if isinstance(part, ShardedTensor)]
        for part, copy in zip(parts, host_copies([part.data for part in parts if part.data is not None]), strict=True):
            part.data = copy
    common |= {"vocab_size": vocab_size}
    if optimizer is not None:
        common |= {"optimizer_steps": optimizer_state.num_steps(optimizer)}
    return Content(sharded=mcore_to_pyt_state_dict(state, False), common=common, random=_random_states(device))


def save(path: str, content: Content, progress: Progress, group: dist.ProcessGroup, *, keep_last: int | None) -> None:
    """Write the new folder `path` (absolute, or a URL), completely or not at all. Collective over `group` (gloo).

    The format is Megatron's, the writer is torch's: Megatron's writer spawns processes, which takes 15 s for imports
    and is not allowed in daemonic processes.

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
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer | None,
    vocab_size: int,
    device: torch.device,
    progress: Progress,
    group: dist.ProcessGroup,
) -> None:
    """Load weights and optimizer state. Collective.

    Random states are loaded if as many ranks saved them on the same type of device.

    Raises:
        ValueError: the checkpoint belongs to another model or another kind of optimizer; raised on every rank before
            anything is changed.
    """
    sharded = _sharded_state(chunks, optimizer, is_loading=True)
    _check_fits(path, sharded, vocab_size, group)
    with raise_on_all_ranks(group):
        try:
            state: Any = dist_checkpointing.load(sharded, str(path))
        except CheckpointException as error:  # a BaseException, which callers do not catch
            raise ValueError(f"could not load the checkpoint {path}: {reasons(error)}") from error
        for name, chunk in _named(chunks).items():
            model = unwrapped(chunk)
            model.load_state_dict({**_extra_states(model.state_dict()), **state[name]})
        if optimizer is not None:
            optimizer_state.load(optimizer, state["optimizer"], state["optimizer_steps"])
        if progress.world_size == dist.get_world_size(group):
            states = torch.load(path / f"rng_{dist.get_rank(group)}.pt", weights_only=True)
            if ("cuda" in states) == (device.type == "cuda"):
                _set_random_states(states, device)


def _check_fits(path: Path, sharded: dict[str, Any], vocab_size: int, group: dist.ProcessGroup) -> None:
    """Check a checkpoint before Megatron starts to load it, which first clears embedding and head. Collective.

    Raises:
        ValueError: it does not have exactly the tensors of all ranks; raised on every rank.
    """
    wanted = [part for part in nested_values(load_preprocess(sharded)[0]) if isinstance(part, ShardedTensor)]
    all_keys = {key for keys in all_gather([part.key for part in wanted], group) for key in keys}
    with raise_on_all_ranks(group):
        reason = _mismatch(path, wanted, all_keys, vocab_size)
        if reason:
            raise ValueError(f"could not load the checkpoint {path}: {reason}")


def _mismatch(path: Path, wanted: Sequence[ShardedTensor], all_keys: set[str], vocab_size: int) -> str:
    """Return the reason why a checkpoint cannot be loaded, or an empty string."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
    for part in wanted:
        shape, has_any_rows = tuple(part.global_shape), part.allow_shape_mismatch
        if part.key not in shapes and part.key.startswith(_OPTIMIZER):
            return (
                f"its optimizer has no {part.key.removeprefix(_OPTIMIZER)}, because it was saved with another "
                "MegatronConfig.use_distributed_optimizer (or, if that is False, with another param_dtype); load it "
                "with the settings that saved it"
            )
        if part.key not in shapes:
            return f"it is a checkpoint of another model or backend, without {part.key}"
        if shapes[part.key][has_any_rows:] != shape[has_any_rows:]:
            return (
                f"it is a checkpoint of another model, whose {part.key} has the shape {shapes[part.key]} instead of "
                f"{shape}"
            )
    if others := [key for key in shapes if key not in all_keys and not key.startswith(_OPTIMIZER)]:
        return f"it is a checkpoint of another model, which also has {others[0]}"
    saved_vocab_size = torch.load(path / "common.pt", weights_only=True)["vocab_size"]
    if saved_vocab_size != vocab_size:
        return (
            f"it is a checkpoint of another model, whose vocabulary has {saved_vocab_size} tokens instead of "
            f"{vocab_size}"
        )
    return ""


def _named(chunks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    return {"model" if len(chunks) == 1 else f"model{number}": chunk for number, chunk in enumerate(chunks)}


def _sharded_state(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer | None, *, is_loading: bool
) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",  # other types cannot be loaded with other parallel sizes
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models: Any = {name: unwrapped(chunk) for name, chunk in _named(chunks).items()}
    state = {name: model.sharded_state_dict(metadata=metadata) for name, model in models.items()}
    for parts in state.values():
        for name in _extra_states(parts):
            del parts[name]
    if optimizer is not None:
        parts = optimizer_state.sharded_state(chunks, optimizer, dict(state), metadata, is_loading=is_loading)
        state["optimizer"] = parts
    return state


def _extra_states(state: dict[str, Any]) -> dict[str, Any]:
    """FP8 state of Transformer Engine's modules, and of Megatron's for compatibility. Empty without FP8."""
    return {name: part for name, part in state.items() if "_extra_state" in name}


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
