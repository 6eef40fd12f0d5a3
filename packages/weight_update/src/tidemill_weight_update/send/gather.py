"""Gathering of a bucket's tensors, one after the other, into the arena of rank 0."""

from torch import Tensor

from tidemill_weight_update.failure import Failure
from tidemill_weight_update.send.bucket import Bucket
from tidemill_weight_update.stages import Stages
from tidemill_weight_update.tensors.shards import box_of_dtensor, has_partial_sums, is_dtensor


def check_parts(bucket: Bucket) -> None:
    """Check this rank's parts before `gather`, in which other ranks wait for it.

    Raises:
        TypeError: a DTensor has an unsupported placement.
        ValueError: the local values of a DTensor do not fit its placements.
    """
    for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
        if is_dtensor(tensor) and not has_partial_sums(tensor):
            box_of_dtensor(entry.name, tensor)


def gather(bucket: Bucket, arena: Tensor | None, failure: Failure, stages: Stages) -> None:
    """Copy the full tensors of `bucket`, cast to the dtypes of its entries, to their places in `arena`.

    Collective over the ranks that hold the tensors. Every rank holds one full tensor at a time.

    Args:
        arena: memory of the bucket, uint8; None on ranks other than 0.
        failure: receives an error of a copy. The remaining tensors are still gathered, because other ranks wait.
    """
    for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
        with stages("gather"):
            full = _full(tensor)
        if arena is not None and failure.error is None:
            with failure, stages("fill"):
                entry.view(arena).copy_(full)


def _full(tensor: Tensor) -> Tensor:
    if not is_dtensor(tensor):
        return tensor
    # Parameters that FSDP2 offloaded to the CPU have a mesh of GPUs, whose collectives accept GPU memory only.
    tensor = tensor.to(tensor.device_mesh.device_type)
    assert is_dtensor(tensor)
    return tensor.full_tensor()
