"""DataProto through calls and chains: dense, ragged and object columns, read-only from the object store."""

import sys
import threading

import numpy as np
import pytest
from tidemill_dispatch import Dispatch, Padding, Worker, WorkerError, register, split_over

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")
pytest.importorskip("tidemill_dataproto")
from ray import cloudpickle  # noqa: E402
from tidemill_dataproto import DataProto, pad_dataproto_to_divisor, unpad_dataproto  # noqa: E402
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])
PADDING = Padding(pad=pad_dataproto_to_divisor, unpad=unpad_dataproto)


class Stage(Worker):
    def __init__(self):
        self.register_dispatch_collect_info("both", 1 - self.rank, True)
        self.register_dispatch_collect_info("one", 0, self.rank == 1)

    @register(split_over("both"), blocking=False)
    def add(self, batch, number):
        return DataProto.from_dict(
            tensors={"ids": batch.batch["ids"], "x": batch.batch["x"] + number},
            non_tensors={"uid": batch.non_tensor_batch["uid"]},
        )

    @register(split_over("one"))
    def join(self, batch):
        return batch

    @register(split_over("both"), blocking=False)
    def pad_to_4(self, batch):
        return pad_dataproto_to_divisor(batch, 4)[0]

    @register(Dispatch.RANK_ZERO, blocking=False)
    def load_padded(self, batch):
        return pad_dataproto_to_divisor(batch, 4)[0]

    @register(split_over("both", padding=PADDING), blocking=False)
    def in_parts(self, batch):
        assert len(batch) == 3
        return DataProto.concat([part.rename("x", "y") for part in batch.split(2)])  # removes the padding

    @register(split_over("both"), blocking=False)
    def with_locks(self, batch):
        return DataProto.from_dict({"x": batch["x"]}, {"lock": [threading.Lock() for _ in batch]})

    @register(split_over("both"))
    def rows(self, batch):
        return batch["x"].tolist(), batch.is_padding.tolist()

    @register(split_over("one"))
    def all_rows(self, batch):
        return batch["x"].tolist(), batch.is_padding.tolist()

    @register(split_over("one"))
    def write(self, batch, seen):
        while self.rank > 0 and not ray.get(seen.is_set.remote()):  # after rank 0, which shares the rows
            pass
        batch.batch["x"] -= 1
        ray.get(seen.set.remote())
        return batch


@ray.remote
class Event:
    def __init__(self):
        self._is_set = False

    def set(self):
        self._is_set = True

    def is_set(self):
        return self._is_set


@pytest.fixture(scope="module")
def group(ray_cluster):
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Stage), name_prefix="stage") as group:
        yield group


def test_dataproto_columns_survive_two_chained_calls(group):
    ids = torch.nested.nested_tensor([torch.arange(n) for n in (3, 0, 20_000, 1, 2)], layout=torch.jagged)
    uid = np.array([f"u{row}" for row in range(5)], dtype=object)
    batch = DataProto.from_dict(tensors={"ids": ids, "x": torch.arange(5.0)}, non_tensors={"uid": uid})
    back = group.join(group.add(batch, number=0.5))
    assert torch.equal(back.batch["x"], torch.arange(5.0) + 0.5)
    assert back.non_tensor_batch["uid"].tolist() == uid.tolist()
    for row, expected in zip(back.batch["ids"].unbind(), ids.unbind(), strict=True):
        assert torch.equal(row, expected)


def test_padding_added_by_a_method_is_neither_returned_nor_chained(group):
    batch = DataProto.from_dict({"x": torch.arange(5)})
    for future in (group.pad_to_4(batch), group.load_padded(batch)):
        for argument in (future, future.get()):
            assert group.rows(argument) == [([0, 1, 2], [False] * 3), ([3, 4], [False] * 2)]
            assert group.all_rows(argument) == [([0, 1, 2, 3, 4], [False] * 5)]
        got = future.get()
        assert got["x"].tolist() == [0, 1, 2, 3, 4]
        assert unpad_dataproto(got, 3) == got  # the batch records that its padding is removed


def test_padded_method_may_remove_the_padding_itself(group):
    batch = DataProto.from_dict({"x": torch.arange(5)})
    assert group.in_parts(batch).get()["y"].tolist() == [0, 1, 2, 3, 4]
    assert group.in_parts(group.load_padded(batch)).get()["y"].tolist() == [0, 1, 2, 3, 4]


def test_workers_write_into_copies_of_their_own(group):
    """Rows above 64 KiB are in shared memory, which both ranks and the earlier result read."""
    batch = DataProto.from_dict(tensors={"x": torch.ones(100_000)}, non_tensors={"uid": np.arange(100_000)})
    assert group.write(batch, Event.remote())["x"].eq(0).all()  # the result of rank 1
    future = group.load_padded(batch)
    assert group.write(future, Event.remote())["x"].eq(0).all()
    assert future.get()["x"].eq(1).all()
    assert batch["x"].eq(1).all()


def test_chained_result_that_cannot_be_pickled_is_the_error_of_its_own_call(group):
    message = (
        "'with_locks' of group 'stage', whose result is an argument .* failed to send it: cannot pickle '_thread.lock'"
    )
    with pytest.raises(WorkerError, match=message):
        group.join(group.with_locks(DataProto.from_dict({"x": torch.arange(5)})))
