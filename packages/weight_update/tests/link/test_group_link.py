"""Engines in other processes that can be reached over a link only: what their parameters hold afterwards."""

import random
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from remote_engines import FarEngine, Rank, RankApart, listening, resources, settled, steady
from tidemill_testing import run_ranks
from tidemill_weight_update import GroupLink, WeightUpdater
from tidemill_weight_update.control.request import TOKEN_VARIABLE
from tidemill_weight_update.send import sender
from toy_engines import ToyEngine, freshly_loaded, same, tensors

pytestmark = pytest.mark.timeout(60)

MODES = ["complete", "streaming"]


def as_mode(checkpoint: dict[str, torch.Tensor], mode: str):
    return checkpoint.items() if mode == "complete" else ((name, tensor.clone()) for name, tensor in checkpoint.items())


def holds(engine: FarEngine, checkpoint: dict[str, torch.Tensor]) -> bool:
    return same(engine.state(), freshly_loaded(ToyEngine(engine.tp_size), checkpoint))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[list[Rank]]:
    """Three processes for ranks of engines on another machine, and one for an engine on this one."""
    patch = pytest.MonkeyPatch()
    patch.setenv(TOKEN_VARIABLE, "the token of this run")
    folder = tmp_path_factory.mktemp("ranks")
    started = [Rank(folder, f"far{i}") for i in range(3)] + [Rank(folder, "near", is_far=False)]
    for rank in started:
        rank.wait_until_up()
    yield started
    for rank in started:
        rank.kill()
    patch.undo()


@pytest.fixture
def far(ranks) -> list[str]:
    """The sockets of three ranks that are elsewhere."""
    return [rank.path for rank in ranks[:3]]


@pytest.fixture
def new() -> Iterator[Callable[..., Any]]:
    """`new(class, *args, **kwargs)`: closed at the end of the test."""
    made: list[Any] = []

    def new(kind, *args, **kwargs):
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield new
    for item in reversed(made):
        item.close()


def linked(new, engines: list[FarEngine], **kwargs) -> WeightUpdater:
    return new(WeightUpdater, engines, **{"link": GroupLink(), "timeout_s": 30, **kwargs})


@pytest.mark.parametrize("bucket_bytes", [64, 600, 1 << 20])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_parameters_equal_a_fresh_load_bit_for_bit(new, far, tp_size, mode, bucket_bytes):
    engine = new(FarEngine, far[:tp_size])
    updater = linked(new, [engine], bucket_bytes=bucket_bytes)
    for version in range(3):
        checkpoint = tensors(version)
        stats = updater.update(as_mode(checkpoint, mode), version)
        assert holds(engine, checkpoint)
        assert engine.version == stats.weight_version == str(version)
        assert (stats.verified, stats.num_unverified, stats.quarantined, stats.through_loader) == (True, 0, {}, {})
        assert stats.num_bytes == sum(tensor.nbytes for tensor in checkpoint.values())
        assert (stats.num_buckets > 5) if bucket_bytes < 1000 else (stats.num_buckets == 1)


def test_only_what_a_rank_takes_travels_to_it(new, far):
    """Aligned to 64 bytes a piece; the second rank of two has no use for the first half of the experts, say."""
    checkpoint = tensors(1)
    whole, halves = new(FarEngine, far[:1]), new(FarEngine, far[1:3])
    before = [len(received) for received in whole.ask_all("received") + halves.ask_all("received")]
    updater = linked(new, [whole, halves])
    updater.update(checkpoint.items(), 1)
    received = [r[n:] for r, n in zip(whole.ask_all("received") + halves.ask_all("received"), before, strict=True)]
    ((all_bytes,), *parts) = received
    own = [sum(p.numel() * 4 for p in rank.values()) for rank in halves.state()]
    slack = 64 * len(checkpoint)
    assert sum(tensor.nbytes for tensor in checkpoint.values()) <= all_bytes <= 1 << 20
    for (num_bytes,), parameters in zip(parts, own, strict=True):
        assert num_bytes <= parameters + slack
        assert num_bytes < 0.7 * all_bytes


def _sharded(engines: list[list[str]], num_updates: int, mode: str) -> list[bool]:
    """On each trainer rank: DTensors of different placements, some plain tensors; engines of several sizes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    clients = [FarEngine(paths, f"engine {i}") for i, paths in enumerate(engines)] if dist.get_rank() == 0 else []
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
        stats = updater.update(items if mode == "complete" else iter(items), version)
        results.append(stats.verified and not stats.quarantined and all(holds(client, full) for client in clients))
    updater.close()
    return results


@pytest.mark.parametrize("mode", MODES)
def test_several_trainer_ranks_update_several_engines_here_and_elsewhere(new, ranks, mode):
    paths = [rank.path for rank in ranks]
    results = run_ranks(_sharded, 2, [paths[:1], paths[1:3], paths[3:]], 3, mode)
    assert results == [[True] * 3, [True] * 3]


def test_an_engine_of_this_machine_still_reads_the_arena(new, ranks):
    near, far = new(FarEngine, [ranks[3].path], "near"), new(FarEngine, [ranks[0].path], "far")
    before = len(near.ask_all("received")[0]), len(far.ask_all("received")[0])
    updater = linked(new, [near, far])
    checkpoint = tensors(5)
    updater.update(checkpoint.items(), 1)
    assert holds(near, checkpoint)
    assert holds(far, checkpoint)
    after = len(near.ask_all("received")[0]), len(far.ask_all("received")[0])
    assert (after[0] - before[0], after[1] - before[1]) == (0, 1)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_wrong_is_refused_by_name_and_the_next_update_works(new, far, mode):
    engine = new(FarEngine, far[:2])
    updater = linked(new, [engine], bucket_bytes=600)
    first = tensors(1)
    updater.update(first.items(), 1)

    def refused(change, match: str, error: type[Exception] = RuntimeError) -> None:
        wrong = tensors(2)
        change(wrong)
        with pytest.raises(error, match=match):
            updater.update(as_mode(wrong, mode), 2)
        assert engine.version == "1"
        if mode == "complete":
            assert holds(engine, first)
            assert engine.paused is None
        updater.update(first.items(), 1, engines=[engine])
        assert holds(engine, first)

    refused(lambda t: t.pop("norm.weight"), "'norm'|norm.weight")
    refused(lambda t: t.update(strange=torch.ones(3)), "no parameter for these tensors: 'strange'")
    refused(lambda t: t["embed.weight"].fill_(float("nan")), "'embed.weight'", ValueError)
    refused(lambda t: t.update({"norm.weight": torch.ones(9)}), "norm")


def test_an_iterator_that_raises_half_way_ends_the_update_at_once(new, far):
    engine = new(FarEngine, far[:2])
    updater = linked(new, [engine], bucket_bytes=300)

    def broken():
        yield from list(tensors(1).items())[:7]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        updater.update(broken(), 1)
    checkpoint = tensors(2)
    stats = updater.update(iter(checkpoint.items()), 2)
    assert stats.seconds < 10
    assert holds(engine, checkpoint)


def test_wires_are_kept_and_made_anew_when_the_fleet_changes(new, far, monkeypatch):
    from tidemill_weight_update.remote import connections as connections

    made: list[str] = []

    def connect(store, name, *args, original=connections.connect):
        made.append(name)
        return original(store, name, *args)

    monkeypatch.setattr(connections, "connect", connect)
    first, second = new(FarEngine, far[:1], "first"), new(FarEngine, far[1:3], "second")
    updater = linked(new, [first])

    def wires_of(version: int, **kwargs) -> int:
        made.clear()
        checkpoint = tensors(version)
        updater.update(checkpoint.items(), version, **kwargs)
        assert holds(kwargs.get("engines", [first])[-1], checkpoint)
        return len(made)

    assert wires_of(1) == 1
    assert wires_of(2) == 0
    assert wires_of(3, engines=[first, second]) == 2  # one that joins late has two ranks
    assert wires_of(4) == 0
    assert wires_of(5, engines=[second]) == 0  # in other rows than before
    assert wires_of(6) == 1  # the first sat one update out
    first.close()
    restarted = new(FarEngine, far[:1], "restarted")
    assert wires_of(7, engines=[second, restarted]) == 1
    assert len(set(made)) == len(made)


def test_nothing_is_left_after_close(new, far):
    """On the trainer's side at once; on an engine's when the next trainer comes."""
    engine = new(FarEngine, far[:2])

    def live_once(version: int) -> None:
        updater = linked(new, [engine], bucket_bytes=600)
        for repeat in range(2):
            updater.update(tensors(version).items(), f"{version}.{repeat}")
        updater.close()
        updater.close()

    live_once(0)  # libuv and torch keep a few files of their own from now on
    before = steady(resources)
    on_engine = engine.ask_all("resources")
    for version in range(1, 4):
        live_once(version)
    assert settled(resources, before.__eq__) == before
    assert settled(lambda: engine.ask_all("resources"), on_engine.__eq__) == on_engine


def _shuffled(engine: list[str], port: int, shuffles: int) -> tuple[list[bool], list[tuple[int, int]]]:
    """What came of updates for which rank `shuffles` describes its tensors in ever new orders, and how much each rank
    kept then: the length of its journal, and what it made to send of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    sender.MAX_UNUSED_BYTES = 0
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    client = FarEngine(engine) if rank == 0 else None
    updater = WeightUpdater([client] if client else [], link=GroupLink(port=port), timeout_s=30)
    correct, kept = [], []
    for version in range(24):
        full = tensors(version)
        items = [(n, distribute_tensor(t, mesh, [Shard(0)])) if t.ndim else (n, t) for n, t in full.items()]
        if rank == shuffles:
            random.Random(version // 2).shuffle(items)  # each order twice
        stats = updater.update(items, version)
        correct.append(stats.verified and (client is None or holds(client, full)))
        fast = updater._fast
        kept.append((fast._sender._end, len(fast._link._connections._messages)))
    updater.close()
    return correct, kept


@pytest.mark.parametrize("shuffles", [0, 1])
def test_what_is_described_in_ever_new_ways_is_forgotten(far, shuffles):
    """By all trainer ranks and the engine together, also where rank 0 has a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for correct, kept in run_ranks(_shuffled, 2, far[:1], port, shuffles):
        assert all(correct)
        journals, messages = zip(*kept, strict=True)
        assert max(journals) < 8 * min(journals)
        assert max(messages) < 8


def test_nothing_listens_on_other_addresses(new, far):
    engine = new(FarEngine, far[:1])
    updater = new(WeightUpdater, [engine], link=GroupLink(host="127.0.0.1"), timeout_s=30)
    already = listening()
    updater.update(tensors(1).items(), 1)
    assert {address for address, _ in listening() - already} == {"127.0.0.1"}
    updater.close()
    assert listening() == already


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*"])
def test_a_host_that_means_all_addresses_is_refused(host):
    with pytest.raises(ValueError, match="the one address"):
        GroupLink(host=host)


def test_a_host_that_is_not_ours_is_an_error(new, far):
    engine = new(FarEngine, far[:1])
    updater = new(WeightUpdater, [engine], link=GroupLink(host="192.0.2.1"), timeout_s=5)
    with pytest.raises(RuntimeError, match=r"cannot listen on 192\.0\.2\.1"):
        updater.update(tensors(1).items(), 1)


def test_another_token_is_refused(new, far, monkeypatch):
    engine = new(FarEngine, far[:1])
    monkeypatch.setenv(TOKEN_VARIABLE, "another run's")
    updater = new(WeightUpdater, [engine], link=GroupLink(), timeout_s=5)
    with pytest.raises(RuntimeError, match="did not report"):
        updater.update(tensors(1).items(), 1)


def test_without_a_link_the_error_leads_to_it(new, far):
    engine = new(FarEngine, far[:1])
    updater = new(WeightUpdater, [engine], timeout_s=5)
    with pytest.raises(RuntimeError, match="runs on another machine and WeightUpdater has no link=GroupLink"):
        updater.update(tensors(1).items(), 1)


def test_an_engine_in_another_pid_namespace_is_reached(new, tmp_path, monkeypatch):
    """Not pretended: its /proc shows no trainer."""
    if subprocess.run([*RankApart.COMMAND, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make PID namespaces")
    monkeypatch.setenv(TOKEN_VARIABLE, "the token of this run")
    rank = RankApart(tmp_path, "apart")
    try:
        rank.wait_until_up()
        engine = new(FarEngine, [rank.path])
        updater = linked(new, [engine])
        checkpoint = tensors(3)
        assert updater.update(checkpoint.items(), 1).verified
        assert holds(engine, checkpoint)
        assert engine.ask_all("received") != [[]]
        alone = new(WeightUpdater, [engine], timeout_s=5)
        with pytest.raises(RuntimeError, match="no link=GroupLink"):
            alone.update(checkpoint.items(), 2)
    finally:
        rank.kill()
