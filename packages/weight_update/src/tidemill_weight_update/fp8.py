"""Block-wise float8 weights for engines, from the bfloat16 or float32 weights of a trainer.

The format is that of the checkpoints of DeepSeek-V3 and Qwen3-FP8: each block of 128 x 128 elements of a matrix has one
scale, `max|w| / 448` in float32, and its elements are `w / scale` in float8_e4m3fn. The scales of `name` are named
`name + "_scale_inv"`, although the weights are multiplied by them. A block of zeros, or of numbers whose scale is
rounded to 0, has scale 1.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tidemill_weight_update.tensors import (
    Box,
    LocalShard,
    NamedTensors,
    ShardLike,
    checked_items,
    global_shape_of,
    is_dtensor,
    items_of,
    local_values,
    place_of,
    source_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from tidemill_weight_update.copy.quantize import QuantizeTable, Task

BLOCK = 128
FP8 = torch.float8_e4m3fn
_MATRIX = re.compile(r"_proj(_with_mqa)?\.weight$")


def is_projection(name: str) -> bool:
    """Return whether a tensor is one that checkpoints of DeepSeek-V3 and Qwen3-FP8 have in float8: the weights of
    attention, MLPs and experts, but not embeddings, the output layer, norms and routers.
    """
    return _MATRIX.search(name) is not None


def fp8_launch_args() -> dict[str, str]:
    """Return arguments for `sglang.Engine(...)` that create block-wise float8 parameters for a bfloat16 checkpoint.

    The engine's first weights are random (`load_format="dummy"`): update it before it generates.
    """
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    overrides = json.dumps({"quantization_config": quantization})
    return {"quantization": "fp8", "load_format": "dummy", "json_model_override_args": overrides}


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """A rank's part of a matrix, its float8 values, and a view of the scales of the blocks that it touches."""

    source: Tensor | ShardLike
    offset: tuple[int, int]
    result: Tensor
    scales: Tensor


class BlockFp8:
    """The tensors of a trainer with its matrices in block-wise float8, as an engine receives them.

    `weights = BlockFp8(model.named_parameters())` once, then `updater.update(weights.quantize(), version)` at each
    step. Holds one byte per element of this rank's part of each matrix. NaN and infinity in a block make its scale or
    its elements NaN or infinite, which the update finds.

    Collective on the ranks of DTensors whose shards end inside blocks: they exchange the maxima of blocks.

    Args:
        named_tensors: what `update` accepts, in bfloat16, float16 or float32; read once, here. All ranks of a DTensor
            pass it in the same order.
        is_quantized: whether a name is quantized; other tensors are passed on unchanged.

    Raises:
        ValueError: a tensor to be quantized has not two dims, is no floating-point tensor of at least 16 bits, or is a
            LocalShard that starts or ends inside a block.
    """

    def __init__(self, named_tensors: NamedTensors, is_quantized: Callable[[str], bool] = is_projection) -> None:
        self._items: list[tuple[str, Any]] = []
        self._whole = _Matrices()
        cut: dict[tuple, list[tuple[str, DTensor]]] = {}
        for name, tensor in checked_items(items_of(source_of(named_tensors))):
            if not is_quantized(name):
                self._items.append((name, tensor))
                continue
            _check(name, tensor)
            if isinstance(tensor, Tensor) and is_dtensor(tensor) and not _splits_at_blocks(tensor):
                axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
                cut.setdefault((tensor.device_mesh, *axes), []).append((name, tensor))
            else:
                self._add(self._whole, name, tensor)
        self._cut = [(*self._add_cut(tensors), mesh, axes) for (mesh, *axes), tensors in cut.items()]

    def quantize(self) -> list[tuple[str, Any]]:
        """Quantize the current values of all matrices; return all tensors, the same objects at each call."""
        self._whole.run("quantize")
        for matrices, scales, mesh, axes in self._cut:
            scales.zero_()
            matrices.run("maxima")
            for axis in axes:
                dist.all_reduce(scales, dist.ReduceOp.MAX, group=mesh.get_group(axis))
            scales.copy_(_scales(scales))
            matrices.run("quantize with given scales")
        return self._items

    def _add_cut(self, tensors: Sequence[tuple[str, "DTensor"]]) -> tuple["_Matrices", Tensor]:
        """Add DTensors that are cut inside blocks; return them and the memory of the scales of all their blocks."""
        matrices = _Matrices()
        grids = [tuple(map(_blocks, tensor.shape)) for _, tensor in tensors]
        memory = torch.zeros(sum(map(math.prod, grids)), dtype=torch.float32, device=local_values(tensors[0][1]).device)
        scales = memory.split([math.prod(grid) for grid in grids])
        for (name, tensor), grid, each in zip(tensors, grids, scales, strict=True):
            self._add(matrices, name, tensor, each.view(grid))
        return matrices, memory

    def _add(self, matrices: "_Matrices", name: str, tensor: Tensor | ShardLike, scales: Tensor | None = None) -> None:
        """Add this rank's part of a matrix.

        Args:
            scales: those of all blocks of the matrix; None if the part consists of whole blocks.
        """
        place = place_of(name, tensor)
        if place is None or place[0].numel == 0:
            return
        box, replica = place
        scale_name = f"{name}_scale_inv"
        shape, device = global_shape_of(tensor), local_values(tensor).device
        (row, col), (rows, cols) = box.start, box.shape
        first, end = (row // BLOCK, col // BLOCK), (_blocks(row + rows), _blocks(col + cols))
        if scales is None:
            _check_edges(name, shape, box)
            touched = torch.empty((end[0] - first[0], end[1] - first[1]), dtype=torch.float32, device=device)
        else:
            touched = scales[first[0] : end[0], first[1] : end[1]]
        result = torch.empty(box.shape, dtype=FP8, device=device)
        matrices.add(_Matrix(tensor, (row % BLOCK, col % BLOCK), result, touched))
        if isinstance(tensor, Tensor) and not is_dtensor(tensor):
            self._items += [(name, result), (scale_name, touched)]
            return
        self._items.append((name, _shard(result, shape, box.start, replica)))
        at = _blocks(row), _blocks(col)  # a block belongs to the rank that has its first element
        own = touched[at[0] - first[0] :, at[1] - first[1] :]
        if own.numel():
            self._items.append((scale_name, _shard(own, tuple(map(_blocks, shape)), at, replica)))


def _check_edges(name: str, shape: tuple[int, ...], box: Box) -> None:
    edges = zip(box.start, box.shape, shape, strict=True)
    if any(at % BLOCK or ((at + count) % BLOCK and at + count != size) for at, count, size in edges):
        raise ValueError(
            f"the LocalShard of tensor {name!r} {shape} starts or ends inside a block of {BLOCK} x {BLOCK}: "
            f"it has shape {box.shape} and starts at {box.start}; pass parts of whole blocks, or a DTensor"
        )


class _Matrices:
    """Matrices that are quantized together."""

    def __init__(self) -> None:
        self._matrices: list[_Matrix] = []
        self._addresses: list[int] = []
        self._tables: list[QuantizeTable] = []

    def add(self, matrix: _Matrix) -> None:
        self._matrices.append(matrix)

    def run(self, task: "Task") -> None:
        """Run a task on the current values."""
        values = [local_values(matrix.source) for matrix in self._matrices]
        if not values or not values[0].is_cuda:
            for matrix, each in zip(self._matrices, values, strict=True):
                _run_on_cpu(task, matrix, each.detach())
            return
        addresses = [each.data_ptr() for each in values]
        if addresses != self._addresses:  # first call, or memory has moved
            from tidemill_weight_update.copy.quantize import QuantizeTable, is_aligned

            groups: dict[tuple[torch.dtype, bool], list] = {}
            for matrix, each in zip(self._matrices, values, strict=True):
                block = each, matrix.offset, matrix.result, matrix.scales
                groups.setdefault((each.dtype, is_aligned(block)), []).append(block)
            tables = [QuantizeTable(blocks, aligned=aligned) for (_, aligned), blocks in groups.items()]
            self._addresses, self._tables = addresses, tables
        for table in self._tables:
            table.run(task)


def _run_on_cpu(task: "Task", matrix: _Matrix, values: Tensor) -> None:
    (rows, cols), (row, col) = values.shape, matrix.offset
    down, across = matrix.scales.shape
    if task != "quantize with given scales":
        padded = pad(values.abs(), (col, across * BLOCK - col - cols, row, down * BLOCK - row - rows))
        maxima = padded.view(down, BLOCK, across, BLOCK).amax((1, 3)).float()
        if task == "maxima":
            matrix.scales.copy_(maxima)
            return
        matrix.scales.copy_(_scales(maxima))
    row_of = (torch.arange(rows) + row) // BLOCK
    col_of = (torch.arange(cols) + col) // BLOCK
    matrix.result.copy_(values.float() / matrix.scales[row_of][:, col_of])


def _scales(maxima: Tensor) -> Tensor:
    scales = maxima / torch.finfo(FP8).max
    return torch.where(scales == 0, 1.0, scales)


def _check(name: str, tensor: Tensor | ShardLike) -> None:
    shape, dtype = global_shape_of(tensor), local_values(tensor).dtype
    if len(shape) != 2 or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"tensor {name!r} cannot be quantized: expected a matrix in bfloat16, float16 or float32, got shape "
            f"{shape} and dtype {dtype}; leave it out by is_quantized"
        )


def _splits_at_blocks(tensor: "DTensor") -> bool:
    """Return whether all shards of a DTensor consist of whole blocks, equal on all ranks."""
    parts = [1, 1]
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate() and not placement.is_partial():  # partial sums are refused later, by name
            parts[placement.dim] *= tensor.device_mesh.size(axis)  # pyright: ignore[reportAttributeAccessIssue]
    return all(size % (BLOCK * count) == 0 for size, count in zip(tensor.shape, parts, strict=True) if count > 1)


def _shard(tensor: Tensor, shape: tuple[int, ...], start: tuple[int, ...], replica: tuple[int, int]) -> LocalShard:
    return LocalShard(tensor=tensor, global_shape=shape, start=start, replica=replica[0], num_replicas=replica[1])


def _blocks(size: int) -> int:
    return -(-size // BLOCK)
