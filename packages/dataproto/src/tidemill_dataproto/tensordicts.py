"""Conversion between batches and TensorDicts with non-tensor columns."""

from collections.abc import Mapping
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

__all__ = ["of_tensordict"]

_Tensors = dict[str, Tensor]
_Others = dict[str, Any]


def of_tensordict(data: Any, meta_info: Mapping[str, Any]) -> tuple[_Tensors, _Others, dict[str, Any]]:
    """Tensor columns, other columns and facts of a TensorDict; see `DataProto.from_tensordict`."""
    if not isinstance(data, TensorDictBase) or data.batch_dims != 1:
        size = f" of batch_size {list(data.batch_size)}" if isinstance(data, TensorDictBase) else ""
        raise TypeError(f"expected a TensorDict with batch_size [B], got {type(data).__name__}{size}")
    tensors: _Tensors = {}
    others: _Others = {}
    facts = dict(meta_info)
    for name in data.keys():  # noqa: SIM118 - a TensorDict
        value: Any = data._get_str(name, None)
        if isinstance(value, NonTensorStack):
            others[name] = value.tolist()
        elif isinstance(value, NonTensorData):
            if name in facts:
                raise ValueError(f"{name!r} is NonTensorData of the TensorDict and in meta_info; rename one of them")
            facts[name] = value.data
        else:
            tensors[name] = value
    return tensors, others, facts
