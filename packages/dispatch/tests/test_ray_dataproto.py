"""DataProto through calls and chains: dense, ragged and object columns, read-only as they come from the store."""

import sys

import numpy as np
import pytest
from tidemill_dispatch import Worker, make_nd_compute_dataproto_dispatch_fn, register

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")
DataProto = pytest.importorskip("tidemill_dataproto").DataProto
from ray import cloudpickle  # noqa: E402
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Stage(Worker):
    def __init__(self):
        self.register_dispatch_collect_info("both", 1 - self.rank, True)
        self.register_dispatch_collect_info("one", 0, self.rank == 1)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("both"), blocking=False)
    def add(self, batch, number):
        return DataProto.from_dict(
            tensors={"ids": batch.batch["ids"], "x": batch.batch["x"] + number},
            non_tensors={"uid": batch.non_tensor_batch["uid"]},
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("one"))
    def join(self, batch):
        return batch


def test_a_batch_goes_through_two_calls_and_comes_back(cluster):
    ids = torch.nested.nested_tensor([torch.arange(n) for n in (3, 0, 20_000, 1, 2)], layout=torch.jagged)
    uid = np.array([f"u{row}" for row in range(5)], dtype=object)
    batch = DataProto.from_dict(tensors={"ids": ids, "x": torch.arange(5.0)}, non_tensors={"uid": uid})
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Stage), name_prefix="stage") as group:
        back = group.join(group.add(batch, number=0.5))
    assert torch.equal(back.batch["x"], torch.arange(5.0) + 0.5)
    assert back.non_tensor_batch["uid"].tolist() == uid.tolist()
    for row, expected in zip(back.batch["ids"].unbind(), ids.unbind(), strict=True):
        assert torch.equal(row, expected)
