"""Split medium buffers into pieces where Ray copies them faster that way.

Ray copies every buffer above 1 MiB into its object store with six threads, which it starts for that buffer, and smaller
ones without threads. On a host with few cores, starting the threads takes about as long as copying 10 MiB with one
core (0.3 ms on two cores). There, buffers from 1 to 8 MiB are sent as pieces of 1 MiB, which Ray copies without threads
to consecutive addresses, so that the reader needs no copy. Larger buffers are sent whole: threads copy them with all
cores.
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
_MAX_CUT_BYTES = 8 << 20
_RAY_COPY_THREADS = 6


def cut(data: memoryview) -> list[pickle.PickleBuffer]:
    """Return a buffer of bytes as one or more consecutive buffers."""
    # The size first: Python asks the system for the number of cores at each call, which takes 8 us.
    if _PIECE_BYTES < data.nbytes <= _MAX_CUT_BYTES and (os.cpu_count() or _RAY_COPY_THREADS) < _RAY_COPY_THREADS:
        return [pickle.PickleBuffer(data[at : at + _PIECE_BYTES]) for at in range(0, data.nbytes, _PIECE_BYTES)]
    return [pickle.PickleBuffer(data)]


def join(buffers: list[Any]) -> Tensor:
    """Return the bytes of the buffers as one tensor, uint8 `[num_bytes]`.

    It is a view if the buffers are consecutive in memory, as in Ray's object store, else a copy.
    """
    arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
    if len(arrays) == 1:
        return torch.from_numpy(arrays[0]) if arrays[0].size > 0 else torch.empty(0, dtype=torch.uint8)
    starts = [array.ctypes.data for array in arrays]
    if all(start + array.nbytes == after for array, (start, after) in zip(arrays, pairwise(starts), strict=False)):
        return torch.from_numpy(np.asarray(_Span(arrays, starts[0])))
    return torch.from_numpy(np.concatenate(arrays))


class _Span:
    """Consecutive arrays as one array that keeps them alive; read-only if one of them is."""

    def __init__(self, arrays: list[np.ndarray], start: int) -> None:
        self._arrays = arrays
        read_only = not all(array.flags.writeable for array in arrays)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (sum(array.nbytes for array in arrays),),
            "data": (start, read_only),
        }
