"""The payload of stock SGLang's `load_format="flattened_bucket"`, created without importing sglang.

Each scheduler process reads a pickled `{"flattened_tensor": uint8 tensor, "metadata": [...]}` with an unpickler that
allows torch and a few modules of the standard library. SGLang reads the metadata by attribute (name, shape, dtype,
start_idx, end_idx, numel), so a `SimpleNamespace` is sufficient, and functions of stock torch rebuild the tensor.

On a GPU SGLang responds before its copies are complete. Every payload for GPU memory therefore starts with a call of
`torch.cuda.synchronize`, executed by the unpickler of each tensor-parallel rank: after the response to a bucket, the
copies of the previous bucket are complete on all ranks, and its memory may be reused.
"""

import functools
import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from tidemill_weight_update.control.descriptor import Request, request_to_json
from tidemill_weight_update.memory.handle import BucketHandle, HostMemory

LOAD_FORMAT = "flattened_bucket"


class _Call:
    """Pickles as a call of `function(*args)` and unpickles as its result."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._reduced = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def stock_payload(bucket: BucketHandle) -> bytes:
    """Return the content of `UpdateWeightsFromTensorReqInput.serialized_named_tensors`, needed once per tensor-parallel
    rank.

    Host memory is mapped privately: an engine cannot write to the sender's memory.

    Raises:
        RuntimeError: this process cannot open the host memory: the sender has exited, or runs on another machine, in
            another container or as another user. (Inside a scheduler the same error would crash the engine.)
    """
    memory = bucket.memory
    payload: dict[str, Any] = {}
    if isinstance(memory, HostMemory):
        if not os.access(memory.path, os.R_OK):
            raise RuntimeError(
                f"cannot open the sender's memory {memory.path}: engine and sender must run on one machine, in one PID "
                f"namespace and as one user, and the sender must be alive"
            )
        from_file = functools.partial(torch.from_file, dtype=torch.uint8)
        payload["flattened_tensor"] = _Call(from_file, memory.path, False, memory.num_bytes)
    else:
        payload["fence"] = _Call(torch.cuda.synchronize)
        payload["flattened_tensor"] = _Call(reductions.rebuild_cuda_tensor, *memory.rebuild_args)
    payload["metadata"] = [
        SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=entry.dtype,
            start_idx=entry.start,
            end_idx=entry.end,
            numel=entry.num_bytes,
        )
        for entry in bucket.entries
    ]
    return pickle.dumps(payload, protocol=4)


def request_payload(request: Request) -> bytes:
    """Return the payload that passes `request` to the tidemill loader: one (name, tensor), whose name is the
    request.
    """
    return pickle.dumps([(request_to_json(request), _Call(torch.empty, 0))], protocol=4)
