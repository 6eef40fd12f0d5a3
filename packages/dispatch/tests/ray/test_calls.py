"""Calls of a group of Ray actors, with every mode."""

import os
import signal
import sys
import threading
import time

import pytest
from tidemill_dispatch import (
    CallTimeoutError,
    Dispatch,
    DispatchMode,
    ListBatch,
    Shard,
    Worker,
    WorkerError,
    register,
    split_over,
    split_over_ranks,
)

ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402
from tidemill_dispatch.ray.packing import pack_calls  # noqa: E402
from tidemill_dispatch.ray.pickling import pack  # noqa: E402

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import a test module
NUM_RANKS = 4


class Unpicklable:
    def __reduce__(self):
        raise ValueError("keep out")


class CountsPickles:
    pickles = 0

    def __reduce__(self):
        CountsPickles.pickles += 1
        return (bytes, (100_000,))


class Picky(ListBatch):
    """A batch whose `concat` raises."""

    def __init__(self, column):
        object.__setattr__(self, "items", [column])

    @staticmethod
    def concat(parts):
        raise KeyError(f"columns {[part.items[0] for part in parts]}")


class EchoWorker(Worker):
    def __init__(self, tag, *, scale):
        self.made_with = (tag, scale)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # allowed in the main thread only
        self.env_at_import = os.environ.get("OMP_NUM_THREADS")
        self.calls = []

    @register(Dispatch.ONE_TO_ALL)
    def describe(self):
        in_main = threading.current_thread() is threading.main_thread()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        env = {name: os.environ[name] for name in names}
        return self.rank, self.world_size, self.made_with, self.env_at_import, in_main, env

    @register(Dispatch.ALL_TO_ALL)
    def register_mesh_entries(self, name, entry):
        self.register_dispatch_collect_info(name, *entry)

    @register(split_over("crossed"))
    def echo(self, batch, *, temperature=1.0, extra=None):
        self.calls.append(len(batch))
        return batch

    @register(split_over("crossed"))
    def place_and_rows(self, batch):
        return self.registered_meshes()["crossed"].dp_rank, self.rank, batch.items

    @register(
        DispatchMode(name="stray", dispatch_fn=lambda group, args, kwargs: {7: ((), {})}, collect_fn=lambda group, r: r)
    )
    def to_stray_rank(self): ...

    @register(
        DispatchMode(
            name="idle",
            dispatch_fn=lambda group, args, kwargs: {1: ((), {})},
            collect_fn=lambda group, results: results,
            collect_ranks_fn=lambda group: (1, 2),
        )
    )
    def from_idle_rank(self): ...

    @register(split_over("nowhere"))
    def over_unknown_mesh(self, batch): ...

    @register(split_over("half"))
    def over_half_mesh(self, batch): ...

    @register(split_over("crossed"))
    def batch_on_some(self, batch):
        return batch if self.registered_meshes()["crossed"].dp_rank == 0 else None

    @register(split_over_ranks())
    def rows_per_rank(self, batch):
        return len(batch)

    @register(Dispatch.RANK_ZERO)
    def only_zero(self, x):
        self.calls.append(x)
        return self.rank, x

    @register(Dispatch.ONE_TO_ALL)
    def num_calls(self):
        return len(self.calls)

    @register(Dispatch.ONE_TO_ALL)
    def store_size(self, value):
        return len(value)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def slow(self, until):
        while not until.exists():
            time.sleep(0.01)
        return self.rank

    @register(Dispatch.ONE_TO_ALL, timeout_s=3.0)
    def too_slow(self, until):
        while self.rank == 2 and not until.exists():
            time.sleep(0.01)

    @register(Dispatch.ONE_TO_ALL)
    def unpicklable_result(self):
        return threading.Lock()

    @register(split_over("crossed"))
    def lock_unless_collected(self, batch):
        return batch if self.registered_meshes()["crossed"].is_collect else threading.Lock()

    @register(split_over("crossed"))
    def raise_unless_collected(self, batch):
        if not self.registered_meshes()["crossed"].is_collect:
            raise OverflowError("gradients")
        return batch

    @register(split_over("crossed"))
    def ragged_results(self, batch):
        return Picky(self.registered_meshes()["crossed"].dp_rank)

    @register(split_over("crossed"), blocking=False)
    def sharded(self, batch, tensor, whole):
        tensor.add_(1)  # the rank's own copy
        return ListBatch([(row, tensor[i].tolist(), whole.tolist()) for i, row in enumerate(batch)])

    @register(Dispatch.ONE_TO_ALL)
    def register_torch_meshes(self):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        self.register_mesh("stages", mesh, ["dp"], collect_at={"pp": -1})
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        self.register_mesh("both", mesh, ["sp", "dp"])

    @register(split_over("stages"))
    def rows_of_stage(self, batch):
        return ListBatch([(self.rank, row) for row in batch])

    @register(split_over("both"))
    def rows_of_both(self, batch):
        return ListBatch([(self.rank, row) for row in batch])

    @register(Dispatch.RANK_ZERO)
    def ask(self, handles):
        return ray.get([handle.not_registered.remote("x") for handle in handles])

    def not_registered(self, x):
        return self.rank, x


@pytest.fixture(scope="module")
def group(ray_cluster):
    pool = RayResourcePool(process_on_nodes=[NUM_RANKS], num_cpus_per_worker=0.5)
    args = RayClassWithInitArgs(EchoWorker, "tag", scale=2)
    env = {"OMP_NUM_THREADS": "7"}
    with RayWorkerGroup(pool, args, name_prefix="echo", env_vars=env, timeout_s=60) as group:
        group.register_mesh_entries(["crossed"] * 4, [(1, False), (0, True), (1, True), (0, False)])
        yield group


def test_workers_have_arguments_environment_and_main_thread(group):
    described = group.describe()
    (port,) = {entry[-1]["MASTER_PORT"] for entry in described}
    for rank, (got_rank, world_size, made_with, omp, in_main, env) in enumerate(described):
        assert (got_rank, world_size, made_with, omp, in_main) == (rank, NUM_RANKS, ("tag", 2), "7", True)
        expected = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
        assert env == {**expected, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_call_over_mesh_in_any_rank_order_is_identity(group, rows):
    batch = ListBatch(list(range(rows)))
    assert group.echo(batch) == batch
    assert group.echo(batch=batch, temperature=0.5, extra={"a": 1}) == batch
    first, second = batch.chunk(2)
    assert group.place_and_rows(batch) == [(0, 1, first.items), (1, 2, second.items)]


def test_only_collect_ranks_send_results(group):
    assert group.lock_unless_collected(ListBatch([1, 2])) == ListBatch([1, 2])  # a lock cannot be pickled


def test_unregistered_and_invalid_meshes_are_refused(group):
    with pytest.raises(ValueError, match=r"group 'echo' has no mesh 'nowhere'; its workers registered \['crossed'"):
        group.over_unknown_mesh(ListBatch([1]))
    group.register_mesh_entries(["half"] * 4, [(0, True), (0, True), (1, False), (2, True)])
    with pytest.raises(ValueError, match=r"mesh 'half': dp_rank 0 \(ranks \[0, 1\]\) has collect ranks \[0, 1\]"):
        group.over_half_mesh(ListBatch([1]))


def test_custom_mode_with_wrong_ranks_is_refused(group):
    message = r"mode 'stray' must return the calls of one or more ranks from 0 to 3 of group 'echo', got .* ranks \[7\]"
    with pytest.raises(ValueError, match=message):
        group.to_stray_rank()
    with pytest.raises(ValueError, match=r"'idle' must name ranks that dispatch_fn calls, .* \[1\], got \[2\]"):
        group.from_idle_rank()


def test_error_on_uncollected_rank_is_raised(group):
    with pytest.raises(WorkerError, match=r"OverflowError on rank [03] of group 'echo'") as caught:
        group.raise_unless_collected(ListBatch([1, 2]))
    assert len(caught.value.other_errors) == 1


def test_error_of_concat_is_in_the_message(group):
    with pytest.raises(
        ValueError, match=r"results of type Picky with \[1, 1\] rows, in dp order, cannot be .*columns \[0, 1\]"
    ):
        group.ragged_results(ListBatch([1, 2]))


@pytest.mark.parametrize("columns", [2, 60_000])
def test_each_rank_receives_own_copy_of_its_tensor_rows(group, columns):
    torch = pytest.importorskip("torch")
    table = torch.arange(3.0 * columns).reshape(3, columns)
    view = table[:, ::columns]  # every row's first number; its storage is the whole table
    future = group.sharded(ListBatch([0, 1, 2]), Shard(view), whole=torch.tensor([True, False]))
    assert future.get().items == [(row, [row * columns + 1.0], [True, False]) for row in range(3)]
    assert table[0, 0] == 0.0
    packed = pack("view", view)
    assert packed.num_bytes < 1000
    assert torch.equal(packed.unpack(), view)


def test_meshes_of_torch_device_meshes(group):
    group.register_torch_meshes()
    assert (group.dp_size("stages"), group.dp_size("both")) == (2, 4)
    assert group.mesh("stages").collect_ranks == (2, 3)  # the last stage
    assert group.rows_of_stage(ListBatch("abcde")).items == [(2, "a"), (2, "b"), (2, "c"), (3, "d"), (3, "e")]
    assert group.rows_of_both(ListBatch("abcd")).items == [(0, "a"), (2, "b"), (1, "c"), (3, "d")]


def test_results_that_are_batches_on_some_ranks_only_are_refused(group):
    with pytest.raises(TypeError, match=r"got \['ListBatch', 'NoneType'\] in dp order"):
        group.batch_on_some(ListBatch([1, 2]))


def test_split_over_ranks_and_rank_zero(group):
    assert group.rows_per_rank(ListBatch(range(6))) == [2, 2, 1, 1]
    before = group.num_calls()
    assert group.only_zero("x") == (0, "x")
    assert [b - a for a, b in zip(before, group.num_calls(), strict=True)] == [1, 0, 0, 0]


def test_shared_argument_is_pickled_once(group):
    CountsPickles.pickles = 0
    assert group.store_size(CountsPickles()) == [100_000] * NUM_RANKS
    assert CountsPickles.pickles == 1


def test_large_arguments_are_stored_once_and_shards_once_per_dp_group(group):
    rows = [bytes(100_000) for _ in range(4)]
    config = bytes(200_000)
    mode = split_over("crossed")
    calls = mode.dispatch_fn(group, (ListBatch(rows),), {"extra": config})
    flat, upstreams = pack_calls("call", calls, lambda rank: "node")
    assert upstreams.receipts == []
    shards, extras = zip(*flat.values(), strict=True)
    assert all(isinstance(ref, ray.ObjectRef) for ref in (*shards, *extras))
    assert len(set(extras)) == 1
    assert (shards[0], shards[1]) == (shards[2], shards[3])  # dp ranks 1, 0, 1, 0
    assert shards[0] != shards[1]


@pytest.mark.parametrize("size", [10, 300_000])
def test_small_and_large_arguments_arrive(group, size):
    assert group.store_size(b"x" * size) == [size] * NUM_RANKS
    assert group.store_size(bytearray(size)) == [size] * NUM_RANKS


def test_future_can_be_got_again_after_timeout(group, tmp_path):
    future = group.slow(tmp_path / "end")
    assert not future.done()
    message = r"'slow' of group 'echo' did not finish within 0.05 s: ranks \[0, 1, 2, 3\]"
    with pytest.raises(CallTimeoutError, match=message):
        future.get(timeout_s=0.05)
    (tmp_path / "end").touch()
    assert future.get(timeout_s=30) == [0, 1, 2, 3]
    assert future.done()
    assert future.get() == [0, 1, 2, 3]


def test_timeout_of_a_method_names_the_ranks_still_running(group, tmp_path):
    with pytest.raises(CallTimeoutError) as caught:
        group.too_slow(tmp_path / "end")
    (tmp_path / "end").touch()
    assert (caught.value.still_running, caught.value.method, caught.value.timeout_s) == ((2,), "too_slow", 3.0)
    assert isinstance(caught.value, TimeoutError)
    assert group.describe()[2][0] == 2  # the group is usable


def test_actor_handles_are_arguments_and_have_the_worker_s_methods(group):
    assert group.ask(group.workers[1:]) == [(1, "x"), (2, "x"), (3, "x")]


def test_wrong_calls_are_refused_before_any_rank_runs(group):
    before = group.num_calls()
    with pytest.raises(
        TypeError,
        match=r"echo\(self, batch, .*\) of group 'echo' cannot be called with these arguments: .*'temprature'",
    ):
        group.echo(ListBatch([1]), temprature=1)
    with pytest.raises(TypeError, match=r"argument 'extra' of EchoWorker.echo cannot be pickled: keep out"):
        group.echo(ListBatch([1]), extra=Unpicklable())
    with pytest.raises(ValueError, match="same number of rows"):
        group.echo(ListBatch([1]), extra=ListBatch([1, 2]))
    with pytest.raises(TypeError, match=r"the method has no @register, add it; registered methods: .*'echo'"):
        group.not_registered(1)
    with pytest.raises(AttributeError, match=r"EchoWorker.nothing cannot be called on group 'echo': no such method"):
        _ = group.nothing
    assert not hasattr(group, "not_registered")
    assert group.num_calls() == before


def test_result_that_cannot_be_pickled_is_a_worker_error(group):
    with pytest.raises(WorkerError, match="in 'unpicklable_result'") as caught:
        group.unpicklable_result()
    assert caught.value.error_type == "TypeError"
    assert group.describe()[0][0] == 0
