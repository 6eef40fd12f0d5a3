"""Pickle with out-of-band buffers."""

import multiprocessing
import pickle
from typing import Any

import numpy as np
import torch
from batch_cases import make
from tidemill_dataproto import DataProto, ragged


def test_out_of_band_pickle_copies_nothing() -> None:
    batch = make()
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    new = pickle.loads(data, buffers=buffers)
    assert len(data) < 1000
    for name in ("x", "ids", "mask"):
        old_flat, new_flat = (c.values() if c.is_nested else c for c in (batch[name], new[name]))
        assert old_flat.data_ptr() == new_flat.data_ptr()
    assert len(buffers) == 4  # x, ids, mask, and once the offsets of both


def test_chunk_pickles_only_its_own_bytes() -> None:
    whole = DataProto.from_dict({"x": torch.zeros(1000, 100), "ids": ragged.ragged(torch.zeros(100_000), [100] * 1000)})
    assert len(pickle.dumps(whole.chunk(100)[5], 5)) < 2 * 4000 + 1000


def test_strided_tensors_and_tensors_with_gradients_pickle() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    batch = DataProto.from_dict({"t": base.t(), "e": torch.ones(1).expand(4), "g": torch.ones(4, requires_grad=True)})
    for protocol in (4, 5):
        new = pickle.loads(pickle.dumps(batch, protocol))
        assert new["t"].tolist() == base.t().tolist()
        assert new["e"].tolist() == [1.0] * 4
        assert not new["g"].requires_grad
        new["t"].zero_()
    assert base.sum() == 66


def test_empty_tensors_of_numpy_pickle() -> None:
    """Their stride is 0."""
    batch = DataProto.from_dict({"x": torch.from_numpy(np.zeros((0, 2), np.float32))})
    new = pickle.loads(pickle.dumps(batch, 5))
    assert (new["x"].shape, new["x"].dtype) == ((0, 2), torch.float32)


def test_tensors_unpickled_in_band_are_writable() -> None:
    new = pickle.loads(pickle.dumps(make(), 5))
    new["x"].add_(1)
    weight = torch.ones((), requires_grad=True)
    (ragged.values(new["mask"]) * weight).sum().backward()
    assert weight.grad == ragged.values(new["mask"]).sum()


def _child(queue: Any) -> None:
    queue.put(make())


def test_multiprocessing_queue() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_child, args=(queue,))
    process.start()
    new = queue.get(timeout=60)
    process.join()
    assert new["ids"].values().tolist() == make()["ids"].values().tolist()
    assert new["uid"].tolist() == make()["uid"].tolist()


def test_large_batches_with_every_pickle_protocol() -> None:
    flat = torch.arange(1_500_000, dtype=torch.int32)  # 6 MB, cut into pieces on hosts with few cores
    column = ragged.ragged(flat, [0, 700_000, 800_000])
    batch = DataProto.from_dict({"c": column, "d": flat.reshape(3, -1).bfloat16()})
    for protocol in (4, 5):
        assert pickle.loads(pickle.dumps(batch, protocol)) == batch
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    assert len(data) < 10_000
    new = pickle.loads(data, buffers=buffers)
    assert new == batch
    assert ragged.values(new["c"]).data_ptr() == flat.data_ptr()
