"""Which of the trainer's allocations an engine rank maps to read tensors in place."""

import pytest
import torch
from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.copy.table import Copy, Shard
from tidemill_weight_update.cuda_memory import DeviceMemory
from tidemill_weight_update.plan.plan import CopyPlan
from tidemill_weight_update.receive.plan_cache import BucketCopies
from tidemill_weight_update.tensors import Box, SourceSpec
from torch import nn

CPU = torch.device("cpu")
GPUS = "first", "second"


def descriptor() -> BucketDescriptor:
    """Two tensors [4, 6], the halves of their rows on two GPUs, each in an allocation of its own."""
    memories = [
        DeviceMemory(pid=1, buffer_id=number, handle="", address=0, num_bytes=48, device_uuid=GPUS[number % 2])
        for number in range(4)
    ]
    shards = [
        tuple(Shard(Box((2 * half, 0), (2, 6)), 2 * tensor + half, 0, (6, 1)) for half in range(2))
        for tensor in range(2)
    ]
    sources = tuple(SourceSpec(name, (4, 6), torch.float32) for name in ("up", "down"))
    return BucketDescriptor(sources, tuple(shards), tuple(memories), is_in_place=True, first_checksum=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_allocations_that_a_rank_reads_are_mapped(rank):
    """Tensor-parallel rank `rank` of two has half of the rows of one tensor, and half of the columns of the other."""
    copies = (
        Copy("up", Box((2 * rank, 0), (2, 6)), "up", 0, (6, 1), torch.float32),
        Copy("down", Box((0, 3 * rank), (4, 3)), "down", 0, (3, 1), torch.float32),
    )
    parameters = {"up": nn.Parameter(torch.zeros(2, 6)), "down": nn.Parameter(torch.zeros(4, 3))}
    whole = descriptor()
    bucket = BucketCopies(whole, CopyPlan(copies), parameters, CPU)
    assert bucket.memories == [whole.memories[number] for number in (rank, 2, 3)]
    blocks = [torch.arange(12.0) + 100 * number for number in (rank, 2, 3)]
    bucket._blocks = blocks
    bucket.run(None, {})
    assert torch.equal(parameters["up"], blocks[0].view(2, 6))
    down = torch.cat([block.view(2, 6) for block in blocks[1:]])
    assert torch.equal(parameters["down"], down[:, 3 * rank : 3 * rank + 3])


def test_a_rank_that_reads_nothing_maps_nothing():
    bucket = BucketCopies(descriptor(), CopyPlan(()), {}, CPU)
    assert bucket.memories == []
    bucket.run(None, {})
