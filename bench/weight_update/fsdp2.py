"""Weights of a trainer: plain parameters on one rank, or DTensors sharded by FSDP2."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weight_update.shapes import STD, Weight


class PlainWeights:
    """Whole parameters on one rank."""

    def __init__(self, weights: Sequence[Weight], device: torch.device) -> None:
        self.named = [
            (w.name, nn.Parameter(torch.empty(w.shape, dtype=torch.bfloat16, device=device))) for w in weights
        ]
        self._by_name = dict(self.named)

    def full(self, name: str) -> Tensor:
        return self._by_name[name].detach()

    def change(self, name: str | None) -> None:
        for known, parameter in self.named:
            if name in (None, known):
                parameter.normal_(0.0, STD)


class FSDP2Weights:
    """Parameters of a module that is sharded layer by layer over all ranks."""

    def __init__(self, weights: Sequence[Weight], device: torch.device) -> None:
        self._module = _module(weights, device)
        self.named = list(self._module.named_parameters())
        self._by_name = dict(self.named)

    def full(self, name: str) -> Tensor:
        return self._of(name).full_tensor()

    def change(self, name: str | None) -> None:
        for known, _ in self.named:
            if name in (None, known):
                self._of(known).to_local().normal_(0.0, STD)

    def _of(self, name: str) -> DTensor:
        tensor = self._by_name[name].detach()
        assert isinstance(tensor, DTensor)
        return tensor


def _module(weights: Sequence[Weight], device: torch.device) -> nn.Module:
    """Return a module whose parameters have the names of `weights`, sharded as FSDP2 shards a model."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    root = nn.Module()
    for weight in weights:
        *path, last = weight.name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.empty(weight.shape, dtype=torch.bfloat16, device="meta")))
    for layer in root.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    return root.to_empty(device=device)
