"""The measurements of one case on each trainer rank."""

import contextlib
import dataclasses
import gc
import os
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tidemill_weight_update import UpdateStats, WeightUpdater, __version__
from tidemill_weight_update.sglang import LocalEngine

from weight_update.case import UPDATE_WEIGHTS, Case
from weight_update.check import check_arrival
from weight_update.clock import Timing, measure
from weight_update.distributed import StockDistributed
from weight_update.engine import CALL_TIMEOUT_S, BenchEngine, BenchEngines
from weight_update.floor import floors_of
from weight_update.shapes import weights_of
from weight_update.stock import StockTensors
from weight_update.supervisor import SendMessage
from weight_update.trainer import Trainer

OURS = "ours"
NUM_SAMPLED = 300
ROUND_TRIPS = 20
ENGINE_START_S = 240.0
NO_LIMIT_S = 1e9

_ENVIRONMENT = {
    # SGLang sets it in its engine's process; NCCL requires the same value in all ranks.
    "NCCL_CUMEM_ENABLE": "0",
    # NVLink multicast can put GPUs that others share out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # All ranks run on one machine, whatever its host name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        repeats: updates of each method, after its first.
        max_s: longest time for a stock method, but at least two repeats. Five times as long for the one that our update
            is compared with.
        only: measure methods that contain one of these texts; empty: all.
    """

    repeats: int = 5
    max_s: float = 8.0
    only: tuple[str, ...] = ()


def run_rank(rank: int, folder: str, send_message: SendMessage, case: Case, effort: Effort) -> None:
    """Measure everything on one rank; rank 0 starts the engines and reports the results."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not case.is_cuda:
        torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        engines = BenchEngines([] if rank > 0 else _start_engines(case, Path(folder), send_message))
        stack.callback(engines.shut_down)
        weights = weights_of(case.config)
        trainer = Trainer(case, rank, folder, weights)
        stack.callback(trainer.close)
        stack.push(lambda kind, error, where: _report_error(send_message, error))
        session = Session(case, effort, trainer, engines, send_message if rank == 0 else lambda kind, value: None)
        session.run()
        trainer.synchronize()
        if rank == 0:
            for floor in floors_of(case, weights):
                send_message("floor", dataclasses.asdict(floor) | {"seconds": floor.seconds})
        trainer.synchronize()


def _start_engines(case: Case, folder: Path, send_message: SendMessage) -> list[BenchEngine]:
    started = time.perf_counter()
    engines = []
    for index in range(case.num_engines):
        number = f" {index + 1} of {case.num_engines}" if case.num_engines > 1 else ""
        send_message("note", f"{case.name}: starting SGLang{number}, tp_size={case.tp_size}")
        send_message("patience", ENGINE_START_S)
        engines.append(BenchEngine(case, folder / f"engine{index}", index))
        send_message("file", engines[-1].left_over)
    send_message("fact", {"engine_start_s": time.perf_counter() - started})
    send_message("fact", _versions(case))
    return engines


class Session:
    """The measurements of one rank."""

    def __init__(
        self, case: Case, effort: Effort, trainer: Trainer, engines: BenchEngines, send_message: SendMessage
    ) -> None:
        self._case = case
        self._effort = effort
        self._trainer = trainer
        self._engines = engines
        self._send_message = send_message

    def run(self) -> None:
        """Measure our update, check its result, then measure stock SGLang."""
        num_bytes = sum(weight.num_bytes for weight in self._trainer.weights)
        self._send_message("fact", {"num_tensors": len(self._trainer.weights), "num_bytes": num_bytes})
        self._round_trip()
        self._trainer.synchronize()
        engines = [LocalEngine(engine.engine, timeout_s=CALL_TIMEOUT_S) for engine in self._engines]
        updater = WeightUpdater(engines, timeout_s=CALL_TIMEOUT_S)
        stock = self._stock()

        transfer = updater.declare(self._trainer.named)

        def ours(version: str) -> UpdateStats:
            self._trainer.quantize()
            return _checked(transfer.send(version))

        self._measure(OURS, ours, max_s=NO_LIMIT_S)
        middle = self._case.buckets[1]
        found = check_arrival(self._trainer, self._engines, lambda version: stock.flattened(middle, version), ours)
        self._send_message("fact", {"checked": found})
        updater.close()
        for method, action, share in self._methods(stock):
            self._tidy()
            is_compared = method == label(self._case.to_beat, middle)
            self._measure(method, action, max_s=self._effort.max_s * (5 if is_compared else 1), share=share)
        if isinstance(stock, StockDistributed):
            stock.close()
        self._tidy()

    def _stock(self) -> StockTensors | StockDistributed:
        if self._case.separate:
            return StockDistributed(self._trainer, self._engines, self._case.tp_size)
        return StockTensors(self._trainer, self._engines, self._case)

    def _methods(self, stock: StockTensors | StockDistributed) -> Iterator[tuple[str, Any, float]]:
        """Yield method name, callable with a version, and the share of the tensors that it sends."""
        names = [weight.name for weight in self._trainer.weights]
        sample = names[:: -(-len(names) // NUM_SAMPLED)]
        prefix = "stock distributed," if self._case.separate else "stock"
        small, middle, large = self._case.buckets
        methods: list[tuple[str, Any, float]] = []
        if isinstance(stock, StockTensors) and self._case.is_cuda:
            # It patches torch's tensor sharing, which then cannot share CPU tensors.
            methods.append((label(UPDATE_WEIGHTS, middle), partial(stock.update_weights, middle), 1.0))
        for size in (middle, small, large):
            methods.append((label(f"{prefix} flattened bucket", size), partial(stock.flattened, size), 1.0))
            methods.append((label(f"{prefix} batch", size), partial(stock.batched, size), 1.0))
        methods.append((f"{prefix} one call per tensor", partial(stock.one_by_one, sample), len(sample) / len(names)))
        for method in methods:
            if not self._effort.only or any(text in method[0] for text in self._effort.only):
                yield method

    def _round_trip(self) -> None:
        """Measure a call that does nothing: the minimum cost of one control message."""
        if not self._engines:
            return
        seconds = []
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            self._engines.probe("nothing")
            seconds.append(time.perf_counter() - started)
        self._send_message("fact", {"round_trip_s": sorted(seconds)[ROUND_TRIPS // 2]})

    def _measure(self, method: str, action: Any, *, max_s: float, share: float = 1.0) -> None:
        def alive(version: str) -> Any:
            result = action(version)
            self._send_message("alive", None)
            return result

        timing = measure(self._trainer, method, alive, repeats=self._effort.repeats, max_s=max_s, share=share)
        self._send_message("timing", _as_dict(timing))

    def _tidy(self) -> None:
        """Release GPU memory of buckets that the engine no longer uses."""
        self._trainer.synchronize()
        gc.collect()
        if self._case.is_cuda:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


def label(method: str, num_bytes: int) -> str:
    """Return the method with its size, as shown in the tables."""
    return f"{method}, {num_bytes >> 20} MB" if num_bytes >> 20 else f"{method}, {num_bytes >> 10} KB"


def _report_error(send_message: SendMessage, error: BaseException | None) -> None:
    """Report an error before the teardown, which may wait for other ranks."""
    if error is not None:
        send_message("failed", "".join(traceback.format_exception(error)))


def _versions(case: Case) -> dict[str, str]:
    import sglang

    versions = {"torch": torch.__version__, "sglang": sglang.__version__, "weight_update": __version__}
    if case.is_cuda:
        import triton

        versions |= {"triton": triton.__version__, "gpu": torch.cuda.get_device_name(0)}
    return versions


def _checked(stats: UpdateStats) -> UpdateStats:
    if not stats.verified or stats.num_unverified or stats.quarantined:
        raise RuntimeError(f"expected a fully verified update on all engines, got {stats}")
    return stats


def _as_dict(timing: Timing) -> dict[str, Any]:
    fields = {f.name: getattr(timing, f.name) for f in dataclasses.fields(timing) if f.name != "results"}
    stats = [dataclasses.asdict(result) for result in timing.results if isinstance(result, UpdateStats)]
    return fields | {"median": timing.median, "minimum": timing.minimum, "first_stats": stats[:1], "stats": stats[1:]}
