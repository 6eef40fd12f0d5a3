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
    """
    from tidemill_weight_update.memory.cuda_memory import NotExportableError, export

    stay: list[Piece] = []
    memory_of: list[int] = []
    move: list[Piece] = []
    memories: list[DeviceMemory] = []
    for piece in sorted(pieces, key=lambda piece: piece.local.data_ptr()):
        address = piece.local.data_ptr()
        if piece.local.device != device or piece.local.dtype != piece.spec.dtype:
            move.append(piece)
            continue
        if not memories or address >= memories[-1].address + memories[-1].num_bytes:
            try:
                memories.append(export(address, device))
            except NotExportableError:
                move.append(piece)
                continue
        stay.append(piece)
        memory_of.append(len(memories) - 1)
    return stay, memories, memory_of, move
