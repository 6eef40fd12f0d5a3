"""Toy engine of the stock path."""

import pickle

import torch
from tidemill_weight_update import BucketHandle
from tidemill_weight_update.sglang.payload import stock_payload


class StockToyEngine:
    """Engine that loads as stock SGLang does: it unpickles the payload and copies every tensor to a dict."""

    has_loader = False

    def __init__(self, fail_at: int | None = None, busy: bool = False) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.version = "default"
        self.fail_at = fail_at
        self.busy = busy

    def __repr__(self) -> str:
        return "StockToyEngine"

    @property
    def tp_size(self) -> int:
        return 1

    def load_bucket(self, bucket: BucketHandle) -> None:
        self.calls.append(f"load {bucket.index}")
        if bucket.index == self.fail_at:
            raise ConnectionError("gone")
        bucket = pickle.loads(pickle.dumps(bucket))
        payload = pickle.loads(stock_payload(bucket))
        for meta in payload["metadata"]:
            flat = payload["flattened_tensor"][meta.start_idx : meta.end_idx]
            self.weights[meta.name] = flat.view(meta.dtype).reshape(meta.shape).clone()

    def flush_cache(self) -> None:
        self.calls.append("flush")
        if self.busy:
            raise RuntimeError("1 running request")

    def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    def resume(self) -> None:
        self.calls.append("resume")

    def set_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")
        self.version = version

    def get_weight_version(self) -> str:
        return self.version


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name], tensor), name
