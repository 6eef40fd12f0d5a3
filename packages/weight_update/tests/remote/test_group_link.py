"""Engines in other processes that are reached over a link only: their parameters after updates."""

import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from remote_engines import NamespacedRankProcess, RankProcess, RemoteEngine, listening, resources, settled, steady
from sources import WithEvent, fail
from tidemill_testing import run_ranks
from tidemill_testing.ports import free_ports
from tidemill_weight_update import GroupLink, WeightUpdater
from tidemill_weight_update.remote.group_link import LinkStore
from toy_engines import ToyEngine, freshly_loaded, same, tensors


def holds(engine: RemoteEngine, checkpoint: dict[str, torch.Tensor]) -> bool:
    return same(engine.state(), freshly_loaded(ToyEngine(engine.tp_size), checkpoint))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[list[RankProcess]]:
    """Three rank processes of engines on another machine, and one of an engine on this machine."""
    folder = tmp_path_factory.mktemp("ranks")
    started = [RankProcess(folder, f"remote{i}") for i in range(3)] + [RankProcess(folder, "local", is_remote=False)]
    for rank in started:
        rank.wait_until_up()
    yield started
    for rank in started:
        rank.kill()


@pytest.fixture
def remote(ranks) -> list[str]:
    """Sockets of the three ranks on another machine."""
    return [rank.path for rank in ranks[:3]]


@pytest.fixture
def closing() -> Iterator[Callable[..., Any]]:
    """`closing(class, *args, **kwargs)`: make an object that is closed at the end of the test."""
    made: list[Any] = []

    def closing(kind, *args, **kwargs):
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield closing
    for item in reversed(made):
        item.close()


def linked(closing, engines: list[RemoteEngine], **kwargs) -> WeightUpdater:
    return closing(WeightUpdater, engines, **{"link": GroupLink(), "timeout_s": 30, **kwargs})


@pytest.mark.parametrize("bucket_bytes", [64, 600, 1 << 20])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_parameters_equal_a_fresh_load_bitwise(closing, remote, tp_size, bucket_bytes):
    engine = closing(RemoteEngine, remote[:tp_size])
    updater = linked(closing, [engine], bucket_bytes=bucket_bytes)
    for version in range(3):
        checkpoint = tensors(version)
        stats = updater.update(checkpoint.items(), version)
        assert holds(engine, checkpoint)
        assert engine.version == stats.weight_version == str(version)
        assert (stats.verified, stats.num_unverified, stats.quarantined, stats.through_loader) == (True, 0, {}, {})
        assert stats.num_bytes == sum(tensor.nbytes for tensor in checkpoint.values())
        assert (stats.num_buckets > 5) if bucket_bytes < 1000 else (stats.num_buckets == 1)


def test_only_the_needed_bytes_are_sent_to_each_rank(closing, remote):
    """The second rank of two does not read the first half of the experts. Parts are aligned to 64 bytes."""
    checkpoint = tensors(1)
    whole, halves = closing(RemoteEngine, remote[:1]), closing(RemoteEngine, remote[1:3])
    before = [len(received) for received in whole.ask_all("received") + halves.ask_all("received")]
    updater = linked(closing, [whole, halves])
    updater.update(checkpoint.items(), 1)
    received = [r[n:] for r, n in zip(whole.ask_all("received") + halves.ask_all("received"), before, strict=True)]
    ((all_bytes,), *parts) = received
    own = [sum(p.numel() * 4 for p in rank.values()) for rank in halves.state()]
    slack = 64 * len(checkpoint)
    assert sum(tensor.nbytes for tensor in checkpoint.values()) <= all_bytes <= 1 << 20
    for (num_bytes,), parameters in zip(parts, own, strict=True):
        assert num_bytes <= parameters + slack
        assert num_bytes < 0.7 * all_bytes


def _sharded(engines: list[list[str]], num_updates: int) -> list[bool]:
    """Update on each trainer rank: DTensors of several placements, plain tensors, engines of several sizes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    clients = [RemoteEngine(paths, f"engine {i}") for i, paths in enumerate(engines)] if dist.get_rank() == 0 else []
    updater = WeightUpdater(clients, bucket_bytes=600, link=GroupLink(), timeout_s=30)
    results = []
    for version in range(num_updates):
        full = tensors(version)
        state = {}
        for index, (name, tensor) in enumerate(full.items()):
            if tensor.ndim == 0:
                state[name] = tensor
            else:
                placement = [Shard(0), Shard(tensor.ndim - 1), Replicate()][index % 3]
                state[name] = distribute_tensor(tensor, mesh, [placement])
        items = list(state.items())
        if dist.get_rank() == 1:
            items.reverse()
        stats = updater.update(items, version)
        results.append(stats.verified and not stats.quarantined and all(holds(client, full) for client in clients))
    updater.close()
    return results


def test_trainer_ranks_update_local_and_remote_engines(ranks):
    paths = [rank.path for rank in ranks]
    results = run_ranks(_sharded, 2, [paths[:1], paths[1:3], paths[3:]], 3)
    assert results == [[True] * 3, [True] * 3]


def test_local_engine_reads_shared_memory_beside_a_remote_one(closing, ranks):
    local, remote = closing(RemoteEngine, [ranks[3].path], "local"), closing(RemoteEngine, [ranks[0].path], "remote")
    before = len(local.ask_all("received")[0]), len(remote.ask_all("received")[0])
    updater = linked(closing, [local, remote])
    checkpoint = tensors(5)
    updater.update(checkpoint.items(), 1)
    assert holds(local, checkpoint)
    assert holds(remote, checkpoint)
    after = len(local.ask_all("received")[0]), len(remote.ask_all("received")[0])
    assert (after[0] - before[0], after[1] - before[1]) == (0, 1)


def test_function_that_raises_aborts_the_update_and_the_next_one_works(closing, remote):
    engine = closing(RemoteEngine, remote[:2])
    updater = linked(closing, [engine], bucket_bytes=300)

    with pytest.raises(OSError, match="the disk is gone"):
        updater.update(WithEvent(tensors(1).items(), 7, fail(OSError("the disk is gone"))), 1)
    checkpoint = tensors(2)
    assert updater.readmit([engine], checkpoint.items, 2).verified
    assert holds(engine, checkpoint)


def test_connections_are_reused_and_reopened_when_engines_change(closing, remote, monkeypatch):
    made: list[str] = []

    def connect(store, name, *args, original=LinkStore.connect):
        made.append(name)
        return original(store, name, *args)

    monkeypatch.setattr(LinkStore, "connect", connect)
    first, second = closing(RemoteEngine, remote[:1], "first"), closing(RemoteEngine, remote[1:3], "second")
    updater = linked(closing, [first])

    def connections_in_update(version: int, readmitted: Sequence[RemoteEngine] = ()) -> int:
        made.clear()
        checkpoint = tensors(version)
        if readmitted:
            updater.readmit(readmitted, checkpoint.items(), version)
        else:
            updater.update(checkpoint.items(), version)
        assert holds([first, *readmitted][-1], checkpoint)
        return len(made)

    assert connections_in_update(1) == 1
    assert connections_in_update(2) == 0
    assert connections_in_update(3, [first, second]) == 3  # an engine with two ranks joins, the link reopens
    assert connections_in_update(4) == 0
    assert connections_in_update(5, [second]) == 2
    assert connections_in_update(6) == 3
    assert connections_in_update(7) == 0
    first.ask_all("new", 0, 1)  # as if its process had been restarted
    assert connections_in_update(8) == 1
    assert len(set(made)) == len(made)


def test_link_is_reopened_after_a_failed_update(closing, remote):
    engine = closing(RemoteEngine, remote[:2])
    updater = linked(closing, [engine])
    checkpoint = tensors(1)
    ports = []
    for version in range(4):
        if version == 2:
            with pytest.raises(RuntimeError, match="no parameter for these tensors: 'strange'"):
                updater.update([*checkpoint.items(), ("strange", torch.ones(3))], "refused")
            assert (engine.version, engine.paused) == ("1", None)
        assert updater.readmit([engine], checkpoint.items(), version).verified
        ports.append(updater._fast.mailbox.board.path)
    assert ports[0] == ports[1] != ports[2] == ports[3]


def test_close_releases_files_sockets_and_threads(closing, remote):
    """On the trainer's side at once; on an engine's side when the next trainer connects."""
    engine = closing(RemoteEngine, remote[:2])

    def update_and_close(version: int) -> None:
        updater = linked(closing, [engine], bucket_bytes=600)
        for repeat in range(2):
            updater.update(tensors(version).items(), f"{version}.{repeat}")
        updater.close()
        updater.close()

    update_and_close(0)  # libuv and torch open a few files and keep them
    before = steady(resources)
    on_engine = engine.ask_all("resources")
    for version in range(1, 4):
        update_and_close(version)
    assert settled(resources, before.__eq__) == before
    assert settled(lambda: engine.ask_all("resources"), on_engine.__eq__) == on_engine


def test_close_releases_files_sockets_and_threads_while_an_error_is_kept(closing, remote):
    engine = closing(RemoteEngine, remote[:1])
    checkpoint = tensors(1)

    first = linked(closing, [engine], bucket_bytes=300)
    first.update(checkpoint.items(), 1)
    first.close()
    before = steady(resources)
    second = linked(closing, [engine], bucket_bytes=300)
    second.update(checkpoint.items(), 2)
    with pytest.raises(OSError, match="the disk is gone") as kept:
        second.update(WithEvent(checkpoint.items(), 7, fail(OSError("the disk is gone"))), 3)
    second.close()
    assert settled(resources, before.__eq__) == before
    assert kept.traceback  # its frames refer to the store and the wires


def _shuffled(engine: list[str], port: int, shuffles: int) -> tuple[list[bool], list[int]]:
    """Update many times, with rank `shuffles` passing its tensors in a new order every second time.

    Returns:
        whether each update was correct, and after each the number of cached messages.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    client = RemoteEngine(engine) if rank == 0 else None
    updater = WeightUpdater([client] if client else [], link=GroupLink(port=port), timeout_s=30)
    correct, kept = [], []
    for version in range(8):
        full = tensors(version)
        items = [(n, distribute_tensor(t, mesh, [Shard(0)])) if t.ndim else (n, t) for n, t in full.items()]
        if rank == shuffles:
            random.Random(version // 2).shuffle(items)  # each order twice
        stats = updater.update(items, version)
        correct.append(stats.verified and (client is None or holds(client, full)))
        messages = updater._fast._link._messages
        kept.append(sum(len(of_bucket) for _, of_bucket in messages.values()))
    updater.close()
    return correct, kept


@pytest.mark.parametrize("shuffles", [0, 1])
def test_messages_of_reordered_tensors_are_dropped(remote, shuffles):
    for correct, kept in run_ranks(_shuffled, 2, remote[:1], *free_ports(1), shuffles):
        assert all(correct)
        assert max(kept) < 8


def test_link_listens_on_its_host_only(closing, remote):
    engine = closing(RemoteEngine, remote[:1])
    updater = closing(WeightUpdater, [engine], link=GroupLink(host="127.0.0.1"), timeout_s=30)
    already = listening()
    updater.update(tensors(1).items(), 1)
    assert {address for address, _ in listening() - already} == {"127.0.0.1"}
    updater.close()
    assert listening() == already


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*", 3])
def test_host_that_is_no_single_address_is_refused(host):
    with pytest.raises(ValueError, match="the single address"):
        GroupLink(host=host)


@pytest.mark.parametrize("port", [-1, 70_000, "80"])
def test_port_that_does_not_exist_is_refused(port):
    with pytest.raises(ValueError, match=f"port must be an int from 0 to 65535, got {port!r}"):
        GroupLink(port=port)


def test_host_of_another_machine_is_an_error(closing, remote):
    engine = closing(RemoteEngine, remote[:1])
    updater = closing(WeightUpdater, [engine], link=GroupLink(host="192.0.2.1"), timeout_s=5)
    with pytest.raises(RuntimeError, match=r"cannot listen on 192\.0\.2\.1"):
        updater.update(tensors(1).items(), 1)


def test_error_without_link_recommends_group_link(closing, remote):
    engine = closing(RemoteEngine, remote[:1])
    updater = closing(WeightUpdater, [engine], timeout_s=5)
    with pytest.raises(RuntimeError, match="runs on another machine and WeightUpdater has no link=GroupLink"):
        updater.update(tensors(1).items(), 1)


def test_engine_in_another_pid_namespace_is_updated(closing, tmp_path):
    """In a real namespace: its /proc does not show the trainer."""
    if subprocess.run([*NamespacedRankProcess.COMMAND, "true"], capture_output=True).returncode:
        pytest.skip("this user may not create PID namespaces")
    rank = NamespacedRankProcess(tmp_path, "apart")
    try:
        rank.wait_until_up()
        engine = closing(RemoteEngine, [rank.path])
        updater = linked(closing, [engine])
        checkpoint = tensors(3)
        assert updater.update(checkpoint.items(), 1).verified
        assert holds(engine, checkpoint)
        assert engine.ask_all("received") != [[]]
        alone = closing(WeightUpdater, [engine], timeout_s=5)
        with pytest.raises(RuntimeError, match="no link=GroupLink"):
            alone.update(checkpoint.items(), 2)
    finally:
        rank.kill()
