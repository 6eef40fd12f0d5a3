"""Batches from items and items from batches."""

import pytest
import torch
from tidemill_dataproto import DataProto, ragged


def test_items_become_dense_ragged_or_object_columns() -> None:
    rows = [
        {"ids": torch.arange(3), "n": torch.tensor(1.5), "box": torch.zeros(2), "uid": "a", "k": 1},
        {"ids": torch.arange(0), "n": torch.tensor(2.5), "box": torch.ones(2), "uid": "b", "k": [2]},
    ]
    batch = DataProto.from_items(rows, dense=["box"])
    assert ragged.lengths(batch["ids"]).tolist() == [3, 0]
    assert batch["n"].tolist() == [1.5, 2.5]
    assert batch["box"].tolist() == [[0, 0], [1, 1]]
    assert batch["uid"].tolist() == ["a", "b"]
    assert batch["k"].tolist() == [1, [2]]
    assert not batch.meta_info
    equal = DataProto.from_items([{"ids": torch.arange(2)}, {"ids": torch.arange(2)}])
    assert equal["ids"].is_nested  # the kind of a column does not depend on its lengths


def test_items_view_tensors_and_own_meta_info() -> None:
    ids = ragged.ragged(torch.arange(3), [2, 1])
    batch = DataProto.from_dict({"ids": ids}, {"uid": ["a", "b"]}, {"list": []})
    item = batch[1]
    item.batch["ids"][0] = 9
    item.meta_info["list"].append(1)
    assert ragged.values(batch["ids"]).tolist() == [0, 1, 9]
    assert batch.meta_info == {"list": []}
    with pytest.raises(ValueError, match="the same meta_info"):
        DataProto.from_items([batch[0], item])
