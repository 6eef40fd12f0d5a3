"""GPU memory that an update takes, with one very large tensor."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from large_gpu_engine import SHAPE, LargeEngine
from tidemill_weight_update import WeightUpdater
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list that gets the peak number of bytes that all processes took on the device since the start."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, peak, stop, out = torch.cuda.mem_get_info()[0], 0, threading.Event(), []

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.0005):
            peak = max(peak, before - torch.cuda.mem_get_info(0)[0])

    thread = threading.Thread(target=watch)
    thread.start()
    yield out
    stop.set()
    thread.join()
    out.append(max(peak, before - torch.cuda.mem_get_info()[0]))


@pytest.fixture
def engine() -> Iterator[LargeEngine]:
    # The first fill of a tensor loads about 90 MiB of CUDA modules, which any trainer has loaded already.
    torch.zeros(1, dtype=torch.int64, device="cuda")
    started = LargeEngine()
    yield started
    started.close()


@pytest.mark.parametrize("bucket_mib", [16, 256])
@pytest.mark.parametrize("mode", ["collection", "function"])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16], ids=str)
def test_update_takes_two_buckets_of_gpu_memory_for_any_tensor_size(engine, held, mode, bucket_mib):
    weight = torch.empty(SHAPE, dtype=held, device="cuda")
    for part in weight:
        part.normal_()
    items: list[tuple[str, Tensor]] = [("experts.weight", weight)]
    updater = WeightUpdater([engine], bucket_bytes=bucket_mib << 20, dtype=torch.bfloat16, timeout_s=60)
    peak = 0
    for version in range(2):
        with peak_memory() as extra:
            stats = updater.update(items if mode == "collection" else lambda: iter(items), version)
        peak = max(peak, extra[0])
        assert stats.verified
        assert stats.num_bytes == 2 * weight.numel()
    print(f"{held}, {mode}, buckets of {bucket_mib} MiB: {peak / 2**20:.0f} MiB more, {stats.num_buckets} buckets")
    assert peak <= (2 * bucket_mib + 64) << 20
    wanted = [part.bfloat16().double().sum().item() for part in weight]
    assert engine.ask("sums") == wanted
    updater.close()
