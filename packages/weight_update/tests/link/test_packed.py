"""What travels over a link instead of a bucket: it must do to the parameters what the bucket would do."""

import pytest
import torch
from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.memory.mapped import MappedMemories
from tidemill_weight_update.plan.plan import CopyPlan
from tidemill_weight_update.plan.record import record
from tidemill_weight_update.receive.bucket_copies import BucketCopies
from tidemill_weight_update.remote.connections import Message, batches
from tidemill_weight_update.remote.packed import pack_descriptor, parts_from_json, parts_of, parts_to_json
from tidemill_weight_update.send.fast_bucket import in_arena
from tidemill_weight_update.tensors.box import Box
from tidemill_weight_update.tensors.shards import Piece
from tidemill_weight_update.tensors.spec import SourceSpec
from torch import Tensor, nn
from toy_engines import ToyModel, tensors

CPU = torch.device("cpu")


class Twice(nn.Module):
    """Copies all of a tensor to one parameter, and overlapping parts of it to others."""

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


def cut(tensor: Tensor, generator: torch.Generator) -> list[Box]:
    """Boxes that make up the tensor, as trainer ranks may hold them."""
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


def line_of(checkpoint: dict[str, Tensor], generator: torch.Generator, keep: float) -> tuple[BucketDescriptor, Tensor]:
    """A line that holds some boxes of the tensors, and the arena that it describes."""
    pieces = []
    for name, tensor in checkpoint.items():
        for box in cut(tensor, generator):
            if torch.rand((), generator=generator) < keep:
                local = tensor[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))]
                pieces.append(Piece(spec=SourceSpec(name, tuple(tensor.shape), tensor.dtype), box=box, local=local))
    fast_bucket = in_arena(pieces, [SourceSpec(name, tuple(t.shape), t.dtype) for name, t in checkpoint.items()])
    arena = torch.full((fast_bucket.num_bytes,), 255, dtype=torch.uint8)
    for piece, place in zip(fast_bucket.pieces, fast_bucket.places, strict=True):
        flat = piece.local.contiguous().view(-1).view(torch.uint8)
        start = place.offset * piece.spec.dtype.itemsize
        arena[start : start + flat.numel()] = flat
    return fast_bucket.descriptor, arena


def run(
    model: nn.Module, line: BucketDescriptor, plan: CopyPlan, memory: Tensor
) -> tuple[dict[str, Tensor], Tensor, list[int]]:
    """What the copies leave in the parameters, their checksums and their counts."""
    for parameter in model.parameters():
        parameter.fill_(7)
    bucket_copies = BucketCopies(line, plan, dict(model.named_parameters()), CPU)
    bucket_copies.run(memory, MappedMemories(CPU), {})
    state = {name: parameter.clone() for name, parameter in model.named_parameters()}
    return state, bucket_copies.sums.checksums, bucket_copies.counts.tolist()


MODELS = {
    "one rank": (lambda: ToyModel(0, 1), None),
    "first of two": (lambda: ToyModel(0, 2), None),
    "second of two": (lambda: ToyModel(1, 2), None),
    "last of four": (lambda: ToyModel(3, 4), None),
    "overlapping": (Twice, {"both": torch.randn(6, 8), "all": torch.randn(6, 8), "none": torch.randn(3)}),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(8))
def test_a_packed_line_does_what_the_line_does(model, seed):
    make, checkpoint = MODELS[model]
    checkpoint = tensors(seed) if checkpoint is None else checkpoint
    generator = torch.Generator().manual_seed(seed)
    line, arena = line_of(checkpoint, generator, keep=(1.0, 0.6)[seed % 2])
    model = make()
    plan = record(model, [SourceSpec(name, tuple(t.shape), t.dtype) for name, t in checkpoint.items()])
    parts = parts_of(line, plan)
    packed = pack_descriptor(line, parts)
    message = Message(line, parts_to_json(parts))
    assert message.num_bytes == packed.num_bytes
    data = torch.full((message.num_bytes,), 255, dtype=torch.uint8)
    if message.is_whole_bucket:
        data = arena[: message.num_bytes]
    else:
        message.fill(arena, data)
    wanted, checksums, counts = run(model, line, plan, arena)
    got, packed_checksums, packed_counts = run(model, packed.descriptor, plan, data)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert torch.equal(packed_checksums, checksums)
    assert packed_counts == counts
    taken = sum(box.numel * s.dtype.itemsize for s, boxes in zip(line.sources, parts, strict=True) for box in boxes)
    assert taken <= message.num_bytes <= taken + 64 * sum(map(len, parts))


def test_a_rank_that_takes_all_of_a_line_gets_it_as_it_is():
    checkpoint = tensors(1)
    line, _ = line_of(checkpoint, torch.Generator().manual_seed(0), keep=1.0)
    plan = record(ToyModel(0, 1), [SourceSpec(name, tuple(t.shape), t.dtype) for name, t in checkpoint.items()])
    assert Message(line, parts_to_json(parts_of(line, plan))).is_whole_bucket


def test_what_goes_through_the_loader_is_taken_whole():
    spec = SourceSpec("scale", (4, 4), torch.float32)
    pieces = [Piece(spec=spec, box=Box((0, 0), (2, 4)), local=torch.zeros(2, 4))]
    line = in_arena(pieces).descriptor
    assert parts_of(line, CopyPlan(copies=(), through_loader={"scale": "not a copy"})) == ((Box((0, 0), (2, 4)),),)
    assert parts_of(line, CopyPlan(copies=())) == ((),)


def test_parts_come_back_from_json():
    parts = ((Box((0, 1), (2, 3)), Box((4, 0), (1, 1))), (), (Box((), ()),))
    assert parts_from_json(parts_to_json(parts)) == parts


def test_a_line_that_does_not_hold_what_is_asked_for_is_refused():
    spec = SourceSpec("weight", (4, 4), torch.float32)
    line = in_arena([Piece(spec=spec, box=Box((0, 0), (2, 4)), local=torch.zeros(2, 4))]).descriptor
    with pytest.raises(ValueError, match="'weight': the shards hold 8 elements of a box of 16"):
        Message(line, parts_to_json(((Box((0, 0), (4, 4)),),)))


def test_messages_are_sent_together_as_far_as_there_is_room():
    class Sized:
        def __init__(self, num_bytes: int) -> None:
            self.num_bytes = num_bytes

    a, b, c, d = Sized(60), Sized(40), Sized(200), Sized(1)
    assert batches([a, b, a, c, d], 100) == [[a, b], [c], [d]]
    assert batches([], 100) == []
