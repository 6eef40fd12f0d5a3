"""Packed buckets for a link: they contain only what an engine rank reads, and give the same parameters."""

from dataclasses import replace

import pytest
import torch
from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.plan.plan import CopyPlan
from tidemill_weight_update.plan.record import record
from tidemill_weight_update.receive.plan_cache import BucketCopies
from tidemill_weight_update.remote.wire import Message, pack_descriptor, parts_from_json, parts_of, parts_to_json
from tidemill_weight_update.send.sender import FastBucket, in_arena
from tidemill_weight_update.tensors import Box, Piece, SourceSpec
from torch import Tensor, nn
from toy_engines import ToyModel, tensors

CPU = torch.device("cpu")


class Overlapping(nn.Module):
    """Model that copies all of a tensor to one parameter, and overlapping parts of another to two."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.zeros(6, 8), requires_grad=False)
        self.top = nn.Parameter(torch.zeros(4, 8), requires_grad=False)
        self.left = nn.Parameter(torch.zeros(3, 5), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "both":
                self.top.data.copy_(tensor[:4])
                self.left.data.copy_(tensor[1:4, :5])
            elif name == "all":
                self.whole.data.copy_(tensor)


def random_boxes(tensor: Tensor, generator: torch.Generator) -> list[Box]:
    """Boxes that tile the tensor, as the shards of trainer ranks do."""
    boxes = [Box.whole(tuple(tensor.shape))]
    for dim in range(tensor.ndim):
        at = int(torch.randint(0, tensor.shape[dim] + 1, (), generator=generator))
        if 0 < at < tensor.shape[dim]:
            boxes = [
                Box(
                    (*box.start[:dim], first, *box.start[dim + 1 :]),
                    (*box.shape[:dim], length, *box.shape[dim + 1 :]),
                )
                for box in boxes
                for first, length in ((0, at), (at, tensor.shape[dim] - at))
            ]
    return boxes


def bucket_of(
    checkpoint: dict[str, Tensor], generator: torch.Generator, keep: float
) -> tuple[BucketDescriptor, Tensor]:
    """A bucket with some boxes of the tensors, and the arena that it describes."""
    pieces = []
    for name, tensor in checkpoint.items():
        for box in random_boxes(tensor, generator):
            if torch.rand((), generator=generator) < keep:
                local = tensor[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))]
                pieces.append(
                    Piece(
                        spec=SourceSpec(name, tuple(tensor.shape), tensor.dtype),
                        box=box,
                        local=local,
                        device=local.device,
                    )
                )
    fast_bucket = in_arena(pieces)
    arena = torch.full((fast_bucket.num_bytes,), 255, dtype=torch.uint8)
    for piece, place in zip(fast_bucket.pieces, fast_bucket.places, strict=True):
        flat = piece.local.contiguous().view(-1).view(torch.uint8)
        start = place.offset * piece.spec.dtype.itemsize
        arena[start : start + flat.numel()] = flat
    return received(fast_bucket), arena


def received(bucket: FastBucket) -> BucketDescriptor:
    """The descriptor of a bucket that is not mapped."""
    return replace(bucket.descriptor(None, 0), is_in_place=False)


def run(
    model: nn.Module, descriptor: BucketDescriptor, plan: CopyPlan, memory: Tensor
) -> tuple[dict[str, Tensor], Tensor, list[int]]:
    """Run the copies; return the parameters, checksums and non-finite counts."""
    for parameter in model.parameters():
        parameter.fill_(7)
    bucket_copies = BucketCopies(descriptor, plan, dict(model.named_parameters()), CPU)
    bucket_copies.run(memory, {})
    state = {name: parameter.clone() for name, parameter in model.named_parameters()}
    return state, bucket_copies.sums.checksums, bucket_copies.counts.tolist()


MODELS = {
    "one rank": (lambda: ToyModel(0, 1), None),
    "first of two": (lambda: ToyModel(0, 2), None),
    "second of two": (lambda: ToyModel(1, 2), None),
    "last of four": (lambda: ToyModel(3, 4), None),
    "overlapping": (Overlapping, {"both": torch.randn(6, 8), "all": torch.randn(6, 8), "none": torch.randn(3)}),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(8))
def test_packed_bucket_gives_the_same_parameters_as_the_bucket(model, seed):
    make, checkpoint = MODELS[model]
    checkpoint = tensors(seed) if checkpoint is None else checkpoint
    generator = torch.Generator().manual_seed(seed)
    descriptor, arena = bucket_of(checkpoint, generator, keep=(1.0, 0.6)[seed % 2])
    model = make()
    plan = record(model, [SourceSpec(name, tuple(t.shape), t.dtype) for name, t in checkpoint.items()])
    parts = parts_of(descriptor, plan)
    packed, num_bytes = pack_descriptor(descriptor, parts)
    message = Message(descriptor, parts_to_json(parts), CPU)
    assert message.num_bytes == num_bytes
    data = message.pack(arena)
    wanted, checksums, counts = run(model, descriptor, plan, arena)
    got, packed_checksums, packed_counts = run(model, packed, plan, data)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert torch.equal(packed_checksums, checksums)
    assert packed_counts == counts
    taken = sum(
        box.numel * s.dtype.itemsize for s, boxes in zip(descriptor.sources, parts, strict=True) for box in boxes
    )
    assert taken <= message.num_bytes <= taken + 64 * sum(map(len, parts))


def test_bucket_is_sent_unpacked_to_a_rank_that_reads_all_of_it():
    checkpoint = tensors(1)
    descriptor, arena = bucket_of(checkpoint, torch.Generator().manual_seed(0), keep=1.0)
    plan = record(ToyModel(0, 1), [SourceSpec(name, tuple(t.shape), t.dtype) for name, t in checkpoint.items()])
    message = Message(descriptor, parts_to_json(parts_of(descriptor, plan)), CPU)
    assert message.pack(arena).data_ptr() == arena.data_ptr()


def test_loader_tensors_are_sent_whole():
    spec = SourceSpec("scale", (4, 4), torch.float32)
    pieces = [Piece(spec=spec, box=Box((0, 0), (2, 4)), local=torch.zeros(2, 4), device=torch.device("cpu"))]
    descriptor = received(in_arena(pieces))
    assert parts_of(descriptor, CopyPlan(copies=(), through_loader={"scale": "not a copy"})) == (
        (Box((0, 0), (2, 4)),),
    )
    assert parts_of(descriptor, CopyPlan(copies=())) == ((),)


def test_parts_survive_json():
    parts = ((Box((0, 1), (2, 3)), Box((4, 0), (1, 1))), (), (Box((), ()),))
    assert parts_from_json(parts_to_json(parts)) == parts
