"""Memory and CPU time on the driver's machine while a run works."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tidemill_trainer.stalls.process import Registration, cpu_seconds, registered
from tidemill_trainer.waits import Waits

_INTERVAL_S = 0.1
_GIB = 2**30


class Sampler:
    """Record the peak of memory in each phase, in a thread, and the CPU time between two calls of `mark`.

    Args:
        waits: waits of the driver, which are the phases.
        logs: folder of the run's logs, in which its processes are registered.
    """

    def __init__(self, waits: Waits, logs: Path) -> None:
        self._waits = waits
        self._logs = logs
        self._gpus = gpu_handles()
        self._stops = threading.Event()
        self._peaks: dict[str, dict[str, float]] = defaultdict(dict)
        self._marks: list[tuple[float, dict[str, float]]] = []
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stops.set()
        self._thread.join()

    def mark(self) -> None:
        """Note the CPU time of all processes so far; forget the peaks before the first mark."""
        if not self._marks:
            self._peaks.clear()
        driver = Registration.of_this_process("driver, with Ray")
        self._marks.append((time.monotonic(), cpu_seconds([driver, *registered(self._logs)])))

    def peaks(self) -> dict[str, dict[str, float]]:
        """Return for each phase the peak of memory in GiB: "gpu" (the fullest one, if there is one) and "host"."""
        return {phase: dict(peak) for phase, peak in self._peaks.items()}

    def busy_cores(self) -> dict[str, float]:
        """Return for each process, with its descendants, the CPU seconds per second between the first and last mark."""
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return {name: (cpu - before.get(name, 0.0)) / (end - start) for name, cpu in after.items()}

    def _run(self) -> None:
        while not self._stops.wait(_INTERVAL_S):
            active = self._waits.active()
            memory = psutil.virtual_memory()
            used = {"host": (memory.total - memory.available) / _GIB}
            if self._gpus:
                used["gpu"] = max(read() for read in self._gpus) / _GIB
            peak = self._peaks[active[-1].wait.name if active else "between steps"]
            for name, value in used.items():
                peak[name] = max(peak.get(name, 0.0), value)


def gpu_handles() -> list[Callable[[], float]]:
    """Return a function for each GPU of this machine that returns its used bytes, without using the GPU."""
    nvml = _nvml()
    if nvml is None:
        return []
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    return [lambda handle=handle: float(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


def gpu_facts() -> dict[str, str]:
    """Return name of the first GPU and version of the driver; nothing without a GPU."""
    nvml = _nvml()
    if nvml is None or nvml.nvmlDeviceGetCount() == 0:
        return {}
    name = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0))
    return {"gpu": str(name), "driver": str(nvml.nvmlSystemGetDriverVersion())}


def _nvml() -> Any:
    """Return NVIDIA's library; None where it is not installed, or there is no driver."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
