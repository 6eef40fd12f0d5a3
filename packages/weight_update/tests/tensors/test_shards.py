"""Piece of a tensor that a rank sends, compared with the values that it holds."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tidemill_testing import run_ranks
from tidemill_weight_update import LocalShard, WeightUpdater
from tidemill_weight_update.send.declaration import Declaration
from tidemill_weight_update.tensors import Box, piece_to_send
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from toy_engines import ToyEngine, holds, tensors

SIZES = [(8, 8), (7, 5), (5, 3), (3, 9), (2, 2), (1, 1), (4, 1), (0, 3)]


def placements_of(mesh) -> list[tuple[Any, ...]]:
    from torch.distributed.tensor import Replicate, Shard

    one = [Shard(0), Shard(1), Shard(-1), Replicate()]
    return [(a,) for a in one] if mesh.ndim == 1 else [(a, b) for a in one for b in one]


def box_of(tensor: torch.Tensor, box) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))]


def _boxes(shape: tuple[int, ...]) -> int:
    """Compare all layouts on each rank; return their number."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", shape)
    checked = 0
    for size in SIZES:
        whole = torch.arange(size[0] * size[1], dtype=torch.float32).view(size)
        for placements in placements_of(mesh):
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            sent = torch.zeros(4, *size)
            for name, times in zip("abcd", sent, strict=True):  # the replica that sends depends on the name
                piece = piece_to_send(name, tensor, None, dist.get_rank())
                if piece is not None:
                    assert piece.spec.shape == size
                    assert torch.equal(piece.local, box_of(whole, piece.box)), (size, placements)
                    box_of(times, piece.box).fill_(1)
                checked += 1
            dist.all_reduce(sent)
            assert (sent == 1).all(), (size, placements, sent)  # each element by one rank
    return checked


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_dtensor_pieces_cover_each_element_once(shape):
    world_size = torch.Size(shape).numel()
    layouts = 4 if len(shape) == 1 else 16
    assert run_ranks(_boxes, world_size, shape) == [len(SIZES) * layouts * 4] * world_size


def _fsdp_over_tp_of(rows: int) -> list[str]:
    """Check the pieces of linear layers under FSDP with tensor parallelism; return the placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, rows), torch.nn.Linear(rows, 4))
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), whole[name])
        piece = piece_to_send(name, tensor, None, dist.get_rank())
        sent = torch.zeros(whole[name].shape)
        if piece is not None:
            assert torch.equal(piece.local, box_of(whole[name], piece.box)), (name, tensor.placements)
            box_of(sent, piece.box).fill_(1)
        dist.all_reduce(sent)
        assert (sent == 1).all(), (name, tensor.placements, sent)
    return [str(tensor.placements) for tensor in model.state_dict().values()]


def _fsdp_over_tp() -> list[list[str]]:
    return [_fsdp_over_tp_of(rows) for rows in (8, 12, 10, 6, 2)]


def test_pieces_of_fsdp_with_tensor_parallelism_cover_each_element_once():
    for models in run_ranks(_fsdp_over_tp, 4):
        for placements in models:
            assert any("StridedShard" in text for text in placements)


def _strided_shard_alone() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 1))
    placements = [_StridedShard(0, split_factor=2), Replicate()]
    with pytest.raises(TypeError) as caught:
        piece_to_send("w", DTensor.from_local(torch.zeros(4), mesh, placements), None, 0)
    return str(caught.value)


def test_strided_shard_without_tensor_parallelism_is_refused():
    for message in run_ranks(_strided_shard_alone, 2):
        assert message.startswith("tensor 'w' has unsupported placements (_StridedShard(dim=0, sf=2)")


def _partial_sums() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    tensor = DTensor.from_local(torch.zeros(4), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(TypeError) as caught:
        piece_to_send("w", tensor, None, 0)
    return str(caught.value)


def test_partial_sums_are_refused():
    for message in run_ranks(_partial_sums, 2):
        assert message.startswith("tensor 'w' has an unsupported placement Partial(sum)")
        assert message.endswith("or reduce partial sums with redistribute()")


def _other_mesh() -> bool:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    group = dist.new_group([0, 1])
    found = True
    if dist.get_rank() != 2:
        mesh = DeviceMesh.from_group(group, "cpu")
        found = (
            piece_to_send("a", distribute_tensor(torch.zeros(4), mesh, [Shard(0)]), None, dist.get_rank()) is not None
        )
    dist.barrier()  # rank 2 must not exit while the others still connect
    return found


def test_rank_outside_the_mesh_sends_nothing():
    assert run_ranks(_other_mesh, 3) == [True, True, True]


def test_object_with_the_fields_of_a_local_shard_is_accepted():
    class Part(NamedTuple):
        tensor: Tensor
        global_shape: tuple[int, ...]
        start: tuple[int, ...]
        replica: int = 0
        num_replicas: int = 1

    part = Part(torch.ones(2, 6), (4, 6), (2, 0))
    piece = piece_to_send("w", part, None, 1)
    assert piece is not None
    assert (piece.box, piece.spec.shape) == (Box((2, 0), (2, 6)), (4, 6))
    declared = Declaration([("w", part)], None, 0)
    assert declared.describes([("w", part)])
    assert not declared.describes([("w", part._replace(global_shape=(5, 6)))])
    with pytest.raises(ValueError, match=r"'w'.*starts at \(3, 0\) is not inside \(4, 6\)"):
        piece_to_send("w", part._replace(start=(3, 0)), None, 0)
    with pytest.raises(TypeError, match=r"expected \(str, Tensor or LocalShard\), got \('w', tuple\)"):
        Declaration([("w", tuple(part))], None, 0)


@pytest.mark.parametrize("rows", [(3, 1), (2, 0, 2), (1, 2, 1)])
def test_local_shards_with_start_tile_the_tensor(rows):
    whole = torch.arange(24.0).view(4, 6)
    covered = torch.zeros(4, 6)
    for part, start in zip(whole.split(rows), (sum(rows[:i]) for i in range(len(rows))), strict=True):
        for columns, first in zip(part.split((2, 4), dim=1), (0, 2), strict=True):
            shard = LocalShard(tensor=columns, global_shape=(4, 6), start=(start, first))
            piece = piece_to_send("a", shard, None, group_rank=5)
            assert (piece is None) == (columns.numel() == 0)
            if piece is not None:
                assert torch.equal(piece.local, box_of(whole, piece.box))
                box_of(covered, piece.box).add_(1)
    assert (covered == 1).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor": np.zeros((2, 3))}, r"'w' must have a torch.Tensor, got a <class 'numpy.ndarray'>"),
        ({"start": 0}, r"'w' must have one int per dim in start and global_shape, got 0 and \(4, 3\)"),
        ({"start": (0.5, 0)}, r"must have one int per dim in start and global_shape, got \(0.5, 0\) and \(4, 3\)"),
        ({"global_shape": 12}, r"must have one int per dim in start and global_shape, got \(0, 0\) and 12"),
    ],
)
def test_local_shard_of_wrong_types_is_refused_by_name(fields, message):
    shard = {"tensor": torch.zeros(2, 3), "start": (0, 0), "global_shape": (4, 3)} | fields
    with pytest.raises(TypeError, match=message):
        piece_to_send("w", LocalShard(**shard), None, 0)


def test_numbers_of_numpy_are_sent():
    def numbers(count: int, value: int) -> tuple:
        return (np.int64(value),) * count

    engine = ToyEngine(1)
    updater = WeightUpdater([engine])
    shards = {
        name: LocalShard(tensor=tensor, start=numbers(tensor.ndim, 0), global_shape=tuple(np.array(tensor.shape)))
        for name, tensor in tensors(1).items()
    }
    assert updater.update(shards.items(), 1).verified
    assert holds(engine, tensors(1))
    updater.close()


def test_one_replica_sends_each_tensor_and_all_replicas_take_part():
    senders = []
    for name in map(str, range(40)):
        shard = {"tensor": torch.ones(2), "global_shape": (2,), "start": (0,), "num_replicas": 4}
        pieces = [piece_to_send(name, LocalShard(**shard, replica=replica), None, 0) for replica in range(4)]
        assert sum(piece is not None for piece in pieces) == 1
        senders.append([piece is not None for piece in pieces].index(True))
    assert set(senders) == {0, 1, 2, 3}


def test_plain_tensor_is_sent_by_the_first_rank():
    assert piece_to_send("a", torch.zeros(2), None, 0) is not None
    assert piece_to_send("a", torch.zeros(2), None, 1) is None


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (
            {"tensor": torch.zeros(2, 6), "start": (3, 0)},
            r"'w'.*of shape \(2, 6\) that starts at \(3, 0\) is not inside",
        ),
        ({"tensor": torch.zeros(2, 6), "start": (-1, 0)}, r"'w'.*is not inside \(4, 6\)"),
        ({"tensor": torch.zeros(2, 6), "start": (0,)}, r"'w'.*is not inside \(4, 6\)"),
        ({"tensor": torch.zeros(2), "start": (0, 0)}, r"'w'.*is not inside \(4, 6\)"),
        (
            {"tensor": torch.zeros(4, 6), "start": (0, 0), "replica": 2, "num_replicas": 2},
            r"'w'.*replica must be in .*, got 2 of 2",
        ),
    ],
)
def test_local_shard_that_does_not_fit_is_refused_by_name(shard, message):
    with pytest.raises(ValueError, match=message):
        piece_to_send("w", LocalShard(global_shape=(4, 6), **shard), None, 0)


class Wrapping(Tensor):
    """Wrapper subclass with an inner tensor and a scale, as torchao's weights for the float8 all-gather of FSDP2."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "Wrapping":
        kind = {"dtype": values.dtype, "device": values.device, "strides": values.stride()}
        return Tensor._make_wrapper_subclass(cls, values.shape, **kind)

    def __init__(self, values: Tensor) -> None:
        self.inner, self.scale = values, torch.ones(())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self):
        return ["inner", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, outer_size, outer_stride):
        return cls(inner["inner"])


def test_inner_tensor_of_a_wrapper_subclass_is_sent():
    values = torch.randn(6, 4)
    for wrapped in (Wrapping(values), torch.nn.Parameter(Wrapping(values)), Wrapping(Wrapping(values))):
        for tensor in (wrapped, LocalShard(tensor=wrapped, global_shape=(6, 4), start=(0, 0))):
            piece = piece_to_send("w", tensor, None, 0)
            assert piece is not None
            assert type(piece.local) is Tensor
            assert piece.local.data_ptr() == values.data_ptr()
            declared = Declaration([("w", tensor)], None, 0)
            assert declared.is_own == [True]
            assert declared.describes([("w", tensor)])
            assert not declared.describes([("w", Wrapping(values[1:]))])


def _wrapping_in_dtensors() -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    values = torch.full((4, 2), float(dist.get_rank()))
    local = Wrapping(values)
    tensor = torch.nn.Parameter(DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False))
    with torch.no_grad():
        piece, declared = piece_to_send("w", tensor, None, 0), Declaration([("w", tensor)], None, 0)
        assert piece is not None
        assert declared.is_own == [True]
        return piece.local.data_ptr() == values.data_ptr() and declared.describes([("w", tensor)])


def test_inner_tensor_of_a_wrapper_subclass_in_a_dtensor_is_sent():
    assert run_ranks(_wrapping_in_dtensors, 2) == [True, True]


def test_subclass_without_accessible_values_is_refused_by_name():
    hidden = TwoTensor(torch.ones(3), torch.ones(3))
    for tensor in (hidden, Wrapping(hidden), LocalShard(tensor=hidden, global_shape=(3,), start=(0,))):
        with pytest.raises(TypeError, match=r"tensor 'w' is a torch.testing.*TwoTensor without .* plain tensor$"):
            piece_to_send("w", tensor, None, 0)


def test_tensor_with_freed_storage_is_refused_on_the_sending_rank():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=r"tensor 'w' is a torch\.Tensor without memory of its own"):
        piece_to_send("w", freed, None, 0)
    assert piece_to_send("w", freed, None, 1) is None


def _async_collective() -> tuple[type, list[float]]:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    pending = all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert isinstance(pending, AsyncCollectiveTensor)
    piece = piece_to_send("w", pending, None, 0)
    assert piece is not None
    return type(piece.local), piece.local.tolist()


def test_async_collective_tensor_is_waited_for():
    assert run_ranks(_async_collective, 2) == [(Tensor, [2.0, 2.0, 2.0])] * 2


def test_lazy_negation_and_conjugation_are_refused():
    numbers = torch.complex(torch.randn(4), torch.randn(4))
    for tensor in (numbers.conj().imag, numbers.conj()):
        with pytest.raises(TypeError, match=r"'w' must be dense .* lazily conjugated or negated"):
            piece_to_send("w", tensor, None, 0)


def _uneven() -> tuple[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    local = torch.zeros(5 if dist.get_rank() == 0 else 3, 2)
    sizes = {"shape": torch.Size((8, 2)), "stride": (2, 1), "run_check": False}
    tensor = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], **sizes)
    with pytest.raises(ValueError, match="tensor 'w' has local shape") as caught:
        piece_to_send("w", tensor, None, 0)
    message, _, rest = str(caught.value).partition(", but")
    return message, rest.partition(" (split")[0]


def test_dtensor_with_local_shape_unlike_its_placements_is_refused():
    expected = " its placements (Shard(dim=0),) of (8, 2) require (4, 2)"
    assert run_ranks(_uneven, 2) == [
        ("tensor 'w' has local shape (5, 2) on rank 0", expected),
        ("tensor 'w' has local shape (3, 2) on rank 1", expected),
    ]
