"""A trainer on one GPU, and an engine on another that it can reach by NCCL only."""

import signal
from collections.abc import Iterator

import pytest
import torch
from interrupted_trainer import check_survivor, check_usable, run
from remote_engines import FarEngine, Rank, resources, settled, steady
from tidemill_weight_update import GroupLink, WeightUpdater
from tidemill_weight_update.control.request import TOKEN_VARIABLE
from toy_engines import ToyEngine, freshly_loaded, same, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture
def rank(tmp_path, monkeypatch) -> Iterator[Rank]:
    monkeypatch.setenv(TOKEN_VARIABLE, "the token of this run")
    started = Rank(tmp_path, "far", "cuda:1")
    started.wait_until_up()
    yield started
    started.kill()


def holds(engine: FarEngine, checkpoint: dict[str, torch.Tensor]) -> bool:
    return same(engine.state(), freshly_loaded(ToyEngine(engine.tp_size), checkpoint))


def on_gpu(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cuda:0") for name, tensor in tensors(seed).items()}


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_parameters_equal_a_fresh_load_bit_for_bit(rank, device):
    """From the GPU by NCCL; from host memory by gloo, into the engine's GPU."""
    engine = FarEngine([rank.path])
    updater = WeightUpdater([engine], bucket_bytes=600, device=device, link=GroupLink(), timeout_s=60)
    for version in range(3):
        state = on_gpu(version)
        items = state.items() if version % 2 else ((name, tensor.clone()) for name, tensor in state.items())
        stats = updater.update(items, version)
        assert stats.verified
        assert stats.num_buckets > 5
        assert holds(engine, tensors(version))
    assert sum(map(len, engine.ask_all("received"))) >= 3
    updater.close()
    engine.close()


def test_nothing_is_left_after_close(rank):
    engine = FarEngine([rank.path])

    def live_once(version: int) -> None:
        updater = WeightUpdater([engine], bucket_bytes=600, link=GroupLink(), timeout_s=60)
        for repeat in range(2):
            updater.update(on_gpu(version).items(), f"{version}.{repeat}")
        updater.close()
        torch.cuda.empty_cache()

    for version in range(2):  # NCCL, too, keeps something of its own from the first time on
        live_once(version)
    free = torch.cuda.mem_get_info(0)[0]
    before, on_engine = steady(resources), engine.ask_all("resources")
    for version in range(3):
        live_once(version)
    assert settled(resources, before.__eq__) == before
    assert settled(lambda: engine.ask_all("resources"), on_engine.__eq__) == on_engine
    enough = free - (4 << 20)
    assert settled(lambda: torch.cuda.mem_get_info(0)[0], enough.__le__) >= enough
    engine.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_ends_or_hangs_is_an_error_within_the_deadline(tmp_path, rank, how):
    (outcome,) = run(tmp_path, [[rank]], rank.pid, how, world_size=1, device="cuda:0")
    assert check_survivor(outcome).error


def test_an_engine_outlives_its_trainer(tmp_path, rank):
    assert run(tmp_path, [[rank]], "rank 0", signal.SIGKILL, world_size=1, device="cuda:0") == [None]
    check_usable([rank], device="cuda:0")
