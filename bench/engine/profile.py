"""Profile a step with torch's profiler."""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

NUM_LINES = 25
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")

COMMUNICATION, OTHERS = "communication", "elementwise, reductions"
_CLASSES = (  # the first pattern that matches a kernel's name applies
    (COMMUNICATION, r"nccl"),
    ("attention", r"sdpa|flash|fmha"),
    ("matrix products", r"nvjet|gemm|gemv|cutlass|splitK"),
    ("optimizer", r"multi_tensor_apply|adam"),
    ("norms", r"norm|GammaBeta"),
    ("compiled", r"^triton_"),  # norms, activation and rotary embedding
    ("copies, permutation", r"Memcpy|Memset|copy|[Cc]at|[Ff]ill|index|gather|scatter|[Ss]ort|[Ss]can|nonzero"),
)

Kernel = tuple[str, float, float]
"""Name, start and end in microseconds."""


def profiled(step: Callable[[], Any], device: torch.device) -> str:
    """Run `step` and return the kinds of kernels, the kernels and the operations with the longest device times."""
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if is_cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        started = time.perf_counter()
        step()
        wall_s = time.perf_counter() - started
    events = [event for event in recorded.key_averages() if not event.is_user_annotation]
    if not is_cuda:
        return _table("operations", [(e.key, e.count, e.self_cpu_time_total) for e in events], wall_s)
    names = {e.key for e in events if e.device_type.name == "CUDA"}
    kernels = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in recorded.events() or ()
        if e.device_type.name == "CUDA" and e.name in names
    ]
    totals = [(e.key, e.count, e.self_device_time_total) for e in events if e.device_type.name == "CUDA"]
    operations = [(e.key, e.count, e.self_device_time_total) for e in events if e.device_type.name == "CPU"]
    counts = {e.key: e.count for e in events}
    waits = ", ".join(f"{name} {counts.get(name, 0)}" for name in _WAITS)
    return "\n".join(
        [
            f"profile of {wall_s:.3f} s (recording makes it slower); calls: {waits}",
            summary(kernels, wall_s),
            _table("kernels", totals, wall_s),
            _table("operations", operations, wall_s),
        ]
    )


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, pattern in _CLASSES if re.search(pattern, kernel)), OTHERS)


def summary(kernels: Sequence[Kernel], wall_s: float) -> str:
    """Return the time of each kind of kernel, the idle time, and the time of communication without other kernels."""
    times: dict[str, list[float]] = {}
    for name, start, end in kernels:
        times.setdefault(kind_of(name), []).append(end - start)
    busy = covered((start, end) for _, start, end in kernels)
    at_work = covered((start, end) for name, start, end in kernels if kind_of(name) != COMMUNICATION)
    rows = [(kind, len(values), sum(values)) for kind, values in times.items()]
    rows += [("nothing but communication", 0, busy - at_work), ("nothing", 0, wall_s * 1e6 - busy)]
    return _table("kinds of kernels", rows, wall_s)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total length of the union of spans (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _table(title: str, items: list[tuple[str, int, float]], wall_s: float) -> str:
    items = sorted(items, key=lambda item: -item[2])[:NUM_LINES]
    lines = [
        f"  {time_us / 1e3:10.2f} {time_us / 1e6 / wall_s:6.1%} {count:7}  {name[:110]}"
        for name, count, time_us in items
    ]
    return "\n".join([f"  {title}: ms, share, calls", *lines])
