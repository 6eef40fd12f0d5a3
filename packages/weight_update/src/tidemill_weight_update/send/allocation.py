"""Which tensors of a trainer rank engines can read where they are."""

from collections.abc import Sequence

import torch

from tidemill_weight_update.memory.handle import DeviceMemory
from tidemill_weight_update.tensors.shards import Piece


def allocations(
    pieces: Sequence[Piece], device: torch.device
) -> tuple[list[Piece], list[DeviceMemory], list[int], list[Piece]]:
    """Divides pieces into those that stay where they are and those that have to travel through an arena on `device`.

    A piece stays if it lies on `device`, is sent in its own dtype, and its allocation can be shared between processes
    (not so with `expandable_segments` of torch's allocator).

    Returns:
        pieces that stay, their allocations, for each of them the index of its allocation, and the other pieces.
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
