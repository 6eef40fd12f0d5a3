"""Where a step spends its time, by torch's profiler."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

NUM_LINES = 25
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")


def profiled(step: Callable[[], Any], device: torch.device) -> str:
    """Runs `step` and returns a table of the kernels and operations with the longest time on the device."""
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if is_cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        started = time.perf_counter()
        step()
        wall_s = time.perf_counter() - started
    events = [event for event in recorded.key_averages() if not event.is_user_annotation]
    if not is_cuda:
        return _table("operations", [(e.key, e.count, e.self_cpu_time_total) for e in events], wall_s)
    kernels = [(e.key, e.count, e.self_device_time_total) for e in events if e.device_type.name == "CUDA"]
    operations = [(e.key, e.count, e.self_device_time_total) for e in events if e.device_type.name == "CPU"]
    counts = {e.key: e.count for e in events}
    waits = ", ".join(f"{name} {counts.get(name, 0)}" for name in _WAITS)
    busy = sum(time_us for _, _, time_us in kernels) / 1e6
    return "\n".join(
        [
            f"profile of {wall_s:.3f} s (recording makes it slower), kernels {busy:.3f} s; calls: {waits}",
            _table("kernels", kernels, wall_s),
            _table("operations", operations, wall_s),
        ]
    )


def _table(title: str, items: list[tuple[str, int, float]], wall_s: float) -> str:
    items = sorted(items, key=lambda item: -item[2])[:NUM_LINES]
    lines = [
        f"  {time_us / 1e3:10.2f} {time_us / 1e6 / wall_s:6.1%} {count:7}  {name[:110]}"
        for name, count, time_us in items
    ]
    return "\n".join([f"  {title}: ms, share, calls", *lines])
