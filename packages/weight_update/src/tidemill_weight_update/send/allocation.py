"""The split of tensors into those that engines can read in place and those that must be copied to an arena."""

from collections.abc import Sequence

import torch

from tidemill_weight_update.memory.handle import DeviceMemory
from tidemill_weight_update.tensors.shards import Piece


def allocations(
    pieces: Sequence[Piece], device: torch.device
) -> tuple[list[Piece], list[DeviceMemory], list[int], list[Piece]]:
    """Split pieces into those that engines read in place and those that are copied to an arena on `device`.

    A piece is read in place if it is on `device`, is sent in its own dtype, and its allocation can be shared between
    processes (not the case for `expandable_segments` of torch's allocator).

    Returns:
        The pieces to read in place, their allocations, the index of the allocation of each piece, and the other pieces.
        Both lists of pieces have the given order, in which engines load them.
    """
    from tidemill_weight_update.memory.cuda_memory import NotExportableError, export

    memories: list[DeviceMemory] = []
    memory_of: dict[int, int] = {}  # index of a piece -> index of its allocation
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index].local.data_ptr()):
        local = pieces[index].local
        if local.device != device or local.dtype != pieces[index].spec.dtype:
            continue
        address = local.data_ptr()
        if not memories or address >= memories[-1].address + memories[-1].num_bytes:
            try:
                memories.append(export(address, device))
            except NotExportableError:
                continue
        memory_of[index] = len(memories) - 1
    stay = [piece for index, piece in enumerate(pieces) if index in memory_of]
    move = [piece for index, piece in enumerate(pieces) if index not in memory_of]
    return stay, memories, [memory_of[index] for index in sorted(memory_of)], move
