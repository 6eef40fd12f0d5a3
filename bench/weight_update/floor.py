"""The lower bound of an update: the machine's copy rate."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weight_update.case import Case
from weight_update.shapes import Box, Weight, moved_bytes, needed_bytes, rows_held

_REPEATS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Time to copy `num_bytes` at `bytes_per_s`.

    Attributes:
        num_bytes: bytes to copy.
        bytes_per_s: measured copy rate.
        what: description of the bytes.
    """

    num_bytes: int
    bytes_per_s: float
    what: str

    @property
    def seconds(self) -> float:
        return self.num_bytes / self.bytes_per_s


def floors_of(case: Case, weights: Sequence[Weight]) -> list[Floor]:
    """Return the lower bound to compare with, followed by others for information. Nothing else may run meanwhile."""
    device = torch.device("cuda", 0) if case.is_cuda else torch.device("cpu")
    local = Floor(
        num_bytes=needed_bytes(weights, case.tp_size),
        bytes_per_s=copy_rate(device, device),
        what="copy of an engine rank's parameters" + (" in bfloat16" if case.is_fp8 else "") + " on its GPU",
    )
    num_moved = 0
    if case.num_trainers > 1:
        piece = _piece(case, weights)
        num_moved = moved_bytes(weights, piece, case.tp_size, separate=case.separate, num_engines=case.num_engines)
    if num_moved == 0:  # one GPU, or a trainer with the layout of the engine
        return [local]
    peer = torch.device("cuda", case.num_trainers if case.separate else 1) if case.is_cuda else device
    rate = copy_rate(device, peer)
    return [Floor(num_bytes=num_moved, bytes_per_s=rate, what="bytes that enter or leave the busiest GPU"), local]


def _piece(case: Case, weights: Sequence[Weight]) -> list[dict[str, list[Box]]]:
    return rows_held(weights, case.num_trainers) if case.layout is None else case.layout.boxes(case.config)


def copy_rate(source: torch.device, target: torch.device) -> float:
    """Return the bytes per second of one large copy in one direction."""
    num_bytes = 4 << 30 if source.type == "cuda" else 16 << 20
    a = torch.randint(1 << 62, (num_bytes // 8,), dtype=torch.int64, device=source)
    b = torch.empty_like(a, device=target)
    for _ in range(2):
        b.copy_(a)
    _synchronize(source, target)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        b.copy_(a)
    _synchronize(source, target)
    return num_bytes * _REPEATS / (time.perf_counter() - started)


def _synchronize(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
