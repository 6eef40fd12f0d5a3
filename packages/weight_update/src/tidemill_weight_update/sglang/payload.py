"""What SGLang receives: launch arguments, and payloads in its format, created without importing sglang.

With `load_format="flattened_bucket"`, each scheduler process reads a pickled `{"flattened_tensor": uint8 tensor,
"metadata": [...]}` with an unpickler that allows torch and a few modules of the standard library. SGLang reads the
metadata by attribute (name, shape, dtype, start_idx, end_idx, numel), so a `SimpleNamespace` is sufficient, and
functions of stock torch rebuild the tensor.

On a GPU SGLang responds before its copies are complete. Every payload for GPU memory therefore starts with a call of
`torch.cuda.synchronize`, executed by the unpickler of each tensor-parallel rank: after the response to a bucket, the
copies of the previous bucket are complete on all ranks, and its memory may be reused.
"""

import functools
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from tidemill_weight_update.control.descriptor import Request, request_to_json
from tidemill_weight_update.memory import BucketHandle, HostMemory

LOADER = "tidemill_weight_update.sglang.loader.load"

DRAIN_S = 10.0
"""For a paused engine: aborted requests need one more step."""

FLUSH_WAIT_FRACTION = 0.9
"""Fraction of the client's timeout, so that SGLang reports by itself that requests did not finish."""


def sglang_launch_args(custom_weight_loader: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return arguments for `sglang.Engine(...)` or `ServerArgs(...)`: `Engine(model_path=..., **sglang_launch_args())`.

    To launch a server from the command line: `python -m sglang.launch_server ... --custom-weight-loader
    tidemill_weight_update.sglang.loader.load`.

    Args:
        custom_weight_loader: further custom loaders.
    """
    return {"custom_weight_loader": [*custom_weight_loader, LOADER]}


def has_loader(arguments: Mapping[str, Any]) -> bool:
    """Return whether an engine with these SGLang arguments was launched with the tidemill loader.

    Raises:
        ValueError: the engine has replicas or pipeline stages, whose processes cannot be identified by tensor-parallel
            rank.
    """
    if arguments.get("dp_size", 1) > 1 and not arguments.get("enable_dp_attention", False):
        raise ValueError(
            f"engines with dp_size={arguments['dp_size']} are not supported; launch that many engines instead and pass "
            f"all of them"
        )
    if arguments.get("pp_size", 1) > 1:
        raise ValueError(f"engines with pp_size={arguments['pp_size']} are not supported; launch it with pp_size=1")
    return LOADER in (arguments.get("custom_weight_loader") or [])


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
    if isinstance(memory, bytes):
        payload["flattened_tensor"] = _Call(functools.partial(torch.frombuffer, dtype=torch.uint8), bytearray(memory))
    elif isinstance(memory, HostMemory):
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
