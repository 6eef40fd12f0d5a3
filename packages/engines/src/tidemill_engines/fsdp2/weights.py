"""The weights of a sharded model: loaded by slices, so no rank holds the full model, and exported by name."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from tidemill_engines.hf_weights.layout import Layout, Piece
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles
from tidemill_engines.hf_weights.shard import WeightShard


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield parameters and persistent buffers in state-dict order; of tied ones, only the first."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def tied_aliases(model: torch.nn.Module) -> dict[str, str]:
    """Map the names of tied tensors that `named_weights` omits to the name that it yields."""
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        kept = first.setdefault(id(tensor), name)
        if kept != name:
            aliases[name] = kept
    return aliases


def materialize(model: PreTrainedModel, device: torch.device, param_device: torch.device) -> None:
    """Allocate the tensors of a (sharded) model on the meta device, uninitialized; tied tensors stay tied.

    Args:
        device: device of the buffers.
        param_device: device of the parameters; the CPU if they are offloaded.
    """
    aliases = tied_aliases(model)
    model.to_empty(device=param_device)
    for alias, name in aliases.items():
        owner, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(name))
    if device != param_device:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def load_weights(model: PreTrainedModel, layout: Layout, files: SafetensorsFiles) -> None:
    """Load this rank's part of every tensor of `layout`, cast to the model's dtype, and recompute other buffers.

    Weights that `layout` lacks become zero.

    Raises:
        ValueError: a file is damaged, tied tensors differ in the checkpoint, or the model class does not recompute a
            buffer that checkpoints leave out.
    """
    for name, weight in named_weights(model):
        local, start = local_box(weight)
        if name not in layout:
            local.zero_()
            continue
        for piece in layout[name]:
            common = piece.overlap(start, tuple(local.shape))
            if common is None:
                continue
            region, box = common
            values = files.read(piece.name, region)
            target = local[box]
            target.copy_(values.view(target.shape))
    for alias, name in tied_aliases(model).items():
        local, start = local_box(model.get_parameter(name))
        if local.numel():
            files.check_tied(name, alias, tuple(slice(a, a + n) for a, n in zip(start, local.shape, strict=True)))
    compute_buffers(model)


def local_box(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, and its start in the whole tensor."""
    if not isinstance(weight, DTensor):
        return weight.detach(), (0,) * weight.dim()
    shape, start = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    local = weight.to_local().detach()
    assert tuple(local.shape) == tuple(shape), f"expected local shape {tuple(shape)}, got {tuple(local.shape)}"
    return local, tuple(start)


def checkpoint_tensors(name: str, weight: torch.Tensor, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor of the model as the tensors of the checkpoint that it contains, without communication.

    For a sharded tensor these are partial DTensors, to be summed over the ranks; the part of a rank that holds nothing
    of one is an expanded zero, without memory.
    """
    pieces = layout.get(name)
    if pieces is None:
        yield name, weight
        return
    if len(pieces) == 1 and not pieces[0].stacked:
        yield pieces[0].name, weight
        return
    local, start = local_box(weight)
    for piece in pieces:
        own = _own_share(local, start, piece)
        if isinstance(weight, DTensor):
            placements = [item if isinstance(item, Replicate) else Partial() for item in weight.placements]
            own = DTensor.from_local(own, weight.device_mesh, placements, run_check=False)
        yield piece.name, own


def checkpoint_shards(
    name: str, weight: torch.Tensor, layout: Layout
) -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
    """Yield the same as `checkpoint_tensors`, but only this rank's parts of fused tensors, as views without copies."""
    pieces = layout.get(name)
    if pieces is None or (len(pieces) == 1 and not pieces[0].stacked):
        yield from checkpoint_tensors(name, weight, layout)
        return
    local, start = local_box(weight)
    replica, num_replicas = _replica(weight)
    for piece in pieces:
        common = piece.overlap(start, tuple(local.shape))
        if common is None:
            continue
        region, box = common
        yield (
            piece.name,
            WeightShard(
                tensor=local[box].squeeze(0) if piece.stacked else local[box],
                global_shape=piece.shape[1:] if piece.stacked else piece.shape,
                start=tuple(part.start for part in region),
                replica=replica,
                num_replicas=num_replicas,
            ),
        )


def _replica(weight: torch.Tensor) -> tuple[int, int]:
    """Return index and number of the identical copies of this rank's part of a tensor."""
    index, count = 0, 1
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        for axis, placement in enumerate(weight.placements):
            if isinstance(placement, Replicate):
                index = index * mesh.size(axis) + mesh.get_local_rank(axis)
                count *= mesh.size(axis)
    return index, count


def _own_share(local: torch.Tensor, start: tuple[int, ...], piece: Piece) -> torch.Tensor:
    shape = piece.shape[1:] if piece.stacked else piece.shape
    common = piece.overlap(start, tuple(local.shape))
    if common is None:
        return local.new_zeros(()).expand(shape)
    region, box = common
    values = local[box].squeeze(0) if piece.stacked else local[box]
    if values.shape == shape:
        return values
    share = local.new_zeros(shape)
    share[region] = values
    return share


def compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that checkpoints do not contain, such as rotary frequencies, as `from_pretrained` does.

    Raises:
        ValueError: the model class does not compute a buffer.
    """
    stored = set(model.state_dict())
    computed = {name: buffer for name, buffer in model.named_buffers() if name not in stored}
    for tensor in [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name in stored)]:
        tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue] - transformers then skips it
    for buffer in computed.values():
        buffer.fill_(_unset(buffer.dtype))
    previous = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        model.initialize_weights()
    finally:
        torch.set_default_dtype(previous)
    for name, buffer in computed.items():
        unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer.dtype)
        if buffer.dtype != torch.bool and unset.any():
            raise ValueError(
                f"{type(model).__name__}._init_weights must compute the buffer {name}, as checkpoints do not contain "
                "it, and does not; add it there"
            )


def _unset(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min
