"""Conversion between batches and TensorDicts."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tidemill_dataproto import DataProto


def test_tensordict_with_non_tensors() -> None:
    source = TensorDict({"x": torch.arange(2)}, [2])
    source["uid"] = NonTensorStack("a", "b")
    source["temperature"] = NonTensorData(0.5, batch_size=[2])
    batch = DataProto.from_tensordict(source, {"step": 1})
    assert batch["x"].tolist() == [0, 1]
    assert batch["uid"].tolist() == ["a", "b"]
    assert batch.meta_info == {"step": 1, "temperature": 0.5}
    batch.batch["y"] = torch.zeros(2)
    assert "y" not in source.keys()  # noqa: SIM118 - a TensorDict
    with pytest.raises(ValueError, match="'temperature' is NonTensorData"):
        DataProto.from_tensordict(source, {"temperature": 1})
    with pytest.raises(TypeError, match=r"batch_size \[2, 1\]"):
        DataProto.from_tensordict(TensorDict({}, [2, 1]))
