"""The updater against engines that are small classes of this file."""

import functools
import os
import pickle

import pytest
import torch
from tidemill_weight_update import BucketHandle, WeightUpdater
from tidemill_weight_update.sglang.payload import stock_payload


class MemoryEngine:
    """Loads as SGLang does: unpickles the payload, and copies every tensor to a dict."""

    def __init__(self, fail_at: int | None = None, busy: bool = False) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.handles: list[BucketHandle] = []
        self.calls: list[str] = []
        self.version = "default"
        self.fail_at = fail_at
        self.busy = busy

    def __repr__(self) -> str:
        return "MemoryEngine"

    @property
    def tp_size(self) -> int:
        return 1

    def load_bucket(self, bucket: BucketHandle) -> None:
        self.calls.append("load")
        if bucket.index == self.fail_at:
            raise ConnectionError("gone")
        bucket = pickle.loads(pickle.dumps(bucket))
        self.handles.append(bucket)
        payload = pickle.loads(stock_payload(bucket))
        for meta in payload["metadata"]:
            flat = payload["flattened_tensor"][meta.start_idx : meta.end_idx]
            self.weights[meta.name] = flat.view(meta.dtype).reshape(meta.shape).clone()
        if bucket.weight_version is not None:
            self.version = bucket.weight_version

    def flush_cache(self) -> None:
        self.calls.append("flush")
        if self.busy:
            raise RuntimeError("1 running request")

    def get_weight_version(self) -> str:
        return self.version


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(got) == list(expected) and all(
        got[name].dtype == tensor.dtype and torch.equal(got[name], tensor) for name, tensor in expected.items()
    )


def mixed() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "scalar": torch.tensor(3.5),
        "odd": torch.randn(3, 5).to(torch.bfloat16),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "wide": torch.randn(33, 17),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(8, 6).t(),
        "strided": torch.randn(20)[::3],
        "flags": torch.tensor([True, False, True]),
        "int": torch.tensor([2**40, -1]),
    }


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1000, 1 << 20])
def test_every_tensor_arrives_bit_for_bit(bucket_bytes):
    engine = MemoryEngine()
    updater = WeightUpdater([engine], bucket_bytes=bucket_bytes)
    for version in (1, 2):
        tensors = {name: tensor * version if version == 2 else tensor for name, tensor in mixed().items()}
        stats = updater.update(tensors.items(), version)
        assert same(engine.weights, {name: tensor.contiguous() for name, tensor in tensors.items()})
        assert stats.num_tensors == len(tensors)
        assert stats.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
        assert engine.version == stats.weight_version == str(version)
        engine.weights.clear()
    assert (stats.num_buckets == 1) == (bucket_bytes > 1000 * 5)
    updater.close()
