"""A trainer on one GPU and an engine on another, connected by NCCL only."""

import signal
from collections.abc import Iterator

import pytest
import torch
from interrupted_trainer import check_survivor, check_usable, is_at_most, run
from remote_engines import RankProcess, RemoteEngine, resources, settled, steady
from tidemill_weight_update import GroupLink, WeightUpdater
from toy_engines import ToyEngine, freshly_loaded, same, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture
def rank(tmp_path) -> Iterator[RankProcess]:
    started = RankProcess(tmp_path, "remote", "cuda:1")
    started.wait_until_up()
    yield started
    started.kill()


def holds(engine: RemoteEngine, checkpoint: dict[str, torch.Tensor]) -> bool:
    return same(engine.state(), freshly_loaded(ToyEngine(engine.tp_size), checkpoint))


def on_gpu(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cuda:0") for name, tensor in tensors(seed).items()}


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_parameters_equal_a_fresh_load_bitwise(rank, device):
    """GPU buckets are sent with NCCL, host buckets with gloo; the engine is on a GPU."""
    engine = RemoteEngine([rank.path])
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


def test_close_releases_files_sockets_threads_and_gpu_memory(rank):
    engine = RemoteEngine([rank.path])

    def update_and_close(version: int) -> None:
        updater = WeightUpdater([engine], bucket_bytes=600, link=GroupLink(), timeout_s=60)
        for repeat in range(2):
            updater.update(on_gpu(version).items(), f"{version}.{repeat}")
        updater.close()
        torch.cuda.empty_cache()

    for version in range(2):  # NCCL allocates some memory once and keeps it
        update_and_close(version)
    free = torch.cuda.mem_get_info(0)[0]
    before, ((files, sockets, threads),) = steady(resources), engine.ask_all("resources")
    one_socket_more = files + 1, sockets + 1, threads  # NCCL may close one of the last link's only during the next link
    for version in range(3):
        update_and_close(version)
    assert settled(resources, before.__eq__) == before
    on_engine = settled(lambda: engine.ask_all("resources")[0], lambda now: is_at_most(now, one_socket_more))
    assert is_at_most(on_engine, one_socket_more)  # a leak of one by each of the three links exceeds it
    enough = free - (4 << 20)
    assert settled(lambda: torch.cuda.mem_get_info(0)[0], enough.__le__) >= enough
    engine.close()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_engine_is_an_error(tmp_path, rank, signal_number):
    (outcome,) = run(tmp_path, [[rank]], rank.pid, signal_number, world_size=1, device="cuda:0")
    assert check_survivor(outcome).error


def test_engine_is_usable_after_its_trainer_was_killed(tmp_path, rank):
    assert run(tmp_path, [[rank]], "rank 0", signal.SIGKILL, world_size=1, device="cuda:0") == [None]
    check_usable([rank], device="cuda:0")
