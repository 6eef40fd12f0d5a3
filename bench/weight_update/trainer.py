"""The trainer's side: parameters, and the ranks that hold them."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weight_update.case import Case
from weight_update.shapes import Weight, batches

COLLECTIVE_TIMEOUT = timedelta(seconds=240)
STD = 0.02


class Trainer:
    """One rank of the trainer, in its process group.

    Attributes:
        device: of this rank.
        named: all parameters, as the trainer holds them: plain ones on one rank, DTensors of FSDP2 on several.
    """

    def __init__(self, case: Case, rank: int, folder: str, weights: Sequence[Weight]) -> None:
        self.rank = rank
        self.num_ranks = case.num_trainers
        self.device = torch.device("cuda", rank) if case.is_cuda else torch.device("cpu")
        if case.is_cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if case.is_cuda else "gloo",
            init_method=f"file://{Path(folder, 'store')}",
            rank=rank,
            world_size=case.num_trainers,
            timeout=COLLECTIVE_TIMEOUT,
        )
        torch.manual_seed(rank)
        self.named: list[tuple[str, nn.Parameter]]
        if case.num_trainers == 1:
            self.named = [(w.name, nn.Parameter(self._values(w.shape))) for w in weights]
        else:
            self._module = _fsdp2_module(weights, self.device)
            self.named = list(self._module.named_parameters())
        self.change()

    def _values(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device)

    @torch.no_grad()
    def change(self, name: str | None = None) -> None:
        """Gives all parameters new random values, in place; or the one of this name."""
        for known, parameter in self.named:
            if name in (None, known):
                local_part(parameter).normal_(0.0, STD)

    def batches(self, max_bytes: int) -> list[list[tuple[str, nn.Parameter]]]:
        """All parameters, in runs of at most `max_bytes` of whole tensors, or of one."""
        return batches([(item, item[1].numel() * item[1].element_size()) for item in self.named], max_bytes)

    def synchronize(self) -> None:
        """Returns when all ranks are here and their GPUs idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.agree(0.0)

    def agree(self, number: float) -> float:
        """Rank 0's number, on all ranks."""
        box = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(box, 0)
        return box.item()

    def close(self) -> None:
        dist.destroy_process_group()


def full(tensor: Tensor) -> Tensor:
    """The whole tensor; a collective for a DTensor."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fsdp2_module(weights: Sequence[Weight], device: torch.device) -> nn.Module:
    """A module whose parameters have the names of `weights`, sharded layer by layer as FSDP2 shards a model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

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
