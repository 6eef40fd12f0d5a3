"""Merging of an adapter into its base weights."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tidemill_weight_update.lora.config import LoraConfig
from tidemill_weight_update.lora.names import base_name, is_of_adapter
from tidemill_weight_update.lora.pairs import Pair, pairs_of
from tidemill_weight_update.tensors.shards import is_dtensor


def merge_lora(
    base: Iterable[tuple[str, Tensor]], adapter: Iterable[tuple[str, Tensor]], config: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `base`, those of the adapter's layers merged with it one at a time.

    W + scale * B @ A, computed in float32 and cast to the dtype of W (Hu et al. 2021, arXiv:2106.09685, section 4.1).
    Pass a function that returns the result to `WeightUpdater.update`, so that one merged tensor is alive at a time.
    `base` is not modified.

    Args:
        base: tensors of the model, under its own names or those of a PEFT model, whose adapter tensors are skipped: for
            example `peft_model.state_dict().items()`. DTensors keep their sharding, and the calls are collective.
        adapter: matrices A [r, inputs] and B [outputs, r], named as PEFT names them; DTensors, or plain tensors that
            are equal on all ranks.
        config: settings of the adapter.

    Raises:
        ValueError: `adapter` does not match `config` (see `pairs_of`), or `base` is a collection and lacks a layer of
            the adapter. During iteration: a layer has another shape than the adapter, or is missing.
        TypeError: an item of `adapter` has a wrong type (see `pairs_of`). During iteration: a layer is a LocalShard.
    """
    pairs = pairs_of(adapter, config)
    if not isinstance(base, Iterator):
        _check_met(pairs, {base_name(name) for name, _ in base})
    return _merged(base, pairs, config.scale)


def _check_met(pairs: dict[str, Pair], names: set[str]) -> None:
    lost = [module for module in pairs if f"{module}.weight" not in names]
    if lost:
        raise ValueError(
            f"the adapter changes layers that the model does not have: {', '.join(map(repr, lost[:5]))}; pass the base "
            f"model of this adapter"
        )


def _merged(base: Iterable[tuple[str, Tensor]], pairs: dict[str, Pair], scale: float) -> Iterator[tuple[str, Tensor]]:
    names: set[str] = set()
    for name, tensor in base:
        if is_of_adapter(name):
            continue
        name = base_name(name)
        names.add(name)
        pair = pairs.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        yield name, tensor if pair is None else _sum(name, tensor, pair, scale)
    _check_met(pairs, names)


@torch.no_grad()
def _sum(name: str, weight: Tensor, pair: Pair, scale: float) -> Tensor:
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name!r} is a LocalShard; pass the full tensor or a DTensor to merge_lora")
    a, b = pair
    if tuple(weight.shape) != (b.shape[0], a.shape[1]):
        raise ValueError(
            f"the adapter expects {name!r} with shape {(b.shape[0], a.shape[1])}, got {tuple(weight.shape)}"
        )
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a, b = (_beside(weight, matrix, dim).to(dtype) for matrix, dim in ((a, 1), (b, 0)))
    return (weight.to(dtype) + scale * (b @ a)).to(weight.dtype)


def _beside(weight: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """Return the matrix on the weight's device: split along `dim` on the mesh axes along which the weight is, else in
    full.
    """
    if not is_dtensor(weight):
        full = matrix.full_tensor() if is_dtensor(matrix) else matrix
        return full.to(weight.device)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = weight.device_mesh
    placements = [Shard(dim) if placement.is_shard(dim) else Replicate() for placement in weight.placements]
    if not is_dtensor(matrix):
        local = matrix.to(mesh.device_type)
        matrix = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return matrix.redistribute(mesh, placements)
