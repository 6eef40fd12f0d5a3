"""Large buffers in pieces, where that is faster.

Ray copies every buffer above 1 MiB into its object store with six threads, which it starts for that buffer. On a host
with fewer cores the threads copy no faster than one, and starting them takes longer than copying megabytes. There,
buffers travel in pieces of 1 MiB, which Ray copies one after another and to places that follow one another, so that
the reader gets the whole back without a copy.
"""

import os
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["cut", "join"]

_PIECE_BYTES = 1 << 20
_RAY_COPY_THREADS = 6


def cut(data: memoryview) -> list[pickle.PickleBuffer]:
    """A buffer of bytes as one or more that follow one another."""
    cores = os.cpu_count()
    if cores is None or cores >= _RAY_COPY_THREADS or data.nbytes <= _PIECE_BYTES:
        return [pickle.PickleBuffer(data)]
    return [pickle.PickleBuffer(data[at : at + _PIECE_BYTES]) for at in range(0, data.nbytes, _PIECE_BYTES)]


def join(buffers: list[Any]) -> Tensor:
    """The bytes of the buffers one after another, uint8 `[num_bytes]`: a view if they follow one another in memory, as
    out of Ray's object store, else a copy."""
    arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
    if len(arrays) == 1:
        return torch.from_numpy(arrays[0]) if arrays[0].size > 0 else torch.empty(0, dtype=torch.uint8)
    starts = [array.ctypes.data for array in arrays]
    if all(start + array.nbytes == after for array, (start, after) in zip(arrays, pairwise(starts), strict=False)):
        return torch.from_numpy(np.asarray(_Span(arrays, starts[0])))
    return torch.from_numpy(np.concatenate(arrays))


class _Span:
    """The memory of arrays that follow one another, as one array that keeps them alive; read-only if one of them is."""

    def __init__(self, arrays: list[np.ndarray], start: int) -> None:
        self._arrays = arrays
        read_only = not all(array.flags.writeable for array in arrays)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (sum(array.nbytes for array in arrays),),
            "data": (start, read_only),
        }
