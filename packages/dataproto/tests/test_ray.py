"""Batches in Ray's object store: exact, read without a copy, usable for training."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import batches, check, make, rows_of
from device_cases import OPERATIONS, host_batch, index_arithmetic, sums
from hypothesis import given, settings
from tidemill_dataproto import DataProto, pad_dataproto_to_divisor, ragged

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=1, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False,
             logging_level="ERROR")  # fmt: skip
    yield
    ray.shutdown()


@given(batches())
@settings(max_examples=40)
def test_put_then_get_is_the_identity(batch: DataProto) -> None:
    got = ray.get(ray.put(batch))
    assert got == batch
    check(got, rows_of(batch), batch)


def large() -> DataProto:
    ids = ragged.ragged(torch.arange(700_000), [300_000, 0, 400_000])
    tensors = {"ids": ids, "loss": ragged.like(torch.rand(700_000), ids), "x": torch.rand(3, 500_000).bfloat16()}
    return DataProto.from_dict(tensors, {"uid": ["a", "b", "c"], "n": np.arange(3)}, {"step": 1})


def test_tensors_are_views_of_the_store() -> None:
    batch = large()
    reference = ray.put(batch)
    first, second = ray.get(reference), ray.get(reference)
    assert first == batch
    for name in ("ids", "loss", "x"):
        a, b = ((ragged.values(c) if c.is_nested else c) for c in (first[name], second[name]))
        assert a.data_ptr() == b.data_ptr()
    del reference, first
    assert second == batch  # the views keep the object alive


def test_training_on_tensors_of_the_store() -> None:
    batch = large()
    reference = ray.put(batch)
    got = ray.get(reference)
    torch.manual_seed(0)
    table = torch.nn.Embedding(16, 4)
    head = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW([*table.parameters(), *head.parameters()], lr=0.1)
    losses = []
    for _ in range(3):
        errors = (head(table(ragged.values(got["ids"]) % 16)).squeeze(1) - ragged.values(got["loss"])).square_()
        loss = ragged.segment_mean(errors, got["ids"]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    leaf = ragged.values(got["loss"]).requires_grad_()
    leaf.square().sum().backward()
    assert torch.equal(leaf.grad, 2 * ragged.values(batch["loss"]))
    own = got.clone()
    own["x"].zero_()
    ragged.values(own["ids"]).zero_()
    assert ray.get(reference) == batch  # the store is unchanged


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_writes_to_the_store(operation: str) -> None:
    reference = ray.put(host_batch())
    got = ray.get(reference)
    assert OPERATIONS[operation](got) == OPERATIONS[operation](host_batch())
    for ours, expected in zip(
        index_arithmetic(got) + sums(got), index_arithmetic(host_batch()) + sums(host_batch()), strict=True
    ):
        assert torch.equal(ours, expected)
    assert ray.get(reference) == host_batch()


def test_remote_task_receives_its_rows_and_padding() -> None:
    @ray.remote
    def double(part: DataProto) -> DataProto:
        doubled = DataProto.from_dict({"y": part["x"] * 2}, meta_info={"metrics": {"rows": len(part)}})
        return part.select(["ids"], ["uid"], []).union(doubled)

    batch = make(5)
    padded, size = pad_dataproto_to_divisor(batch, 2)
    assert size == 1
    result = DataProto.concat(ray.get([double.remote(part) for part in padded.chunk(2)]))
    assert result["y"].tolist() == (batch["x"] * 2).tolist()
    assert result["uid"].tolist() == batch["uid"].tolist()
    assert result.meta_info == {"metrics": [{"rows": 3}, {"rows": 3}]}
