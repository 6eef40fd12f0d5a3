"""The two matrices of each layer that an adapter changes."""

from collections.abc import Iterable

from torch import Tensor

from tidemill_weight_update.lora.config import LoraConfig
from tidemill_weight_update.lora.names import parse, saved_name
from tidemill_weight_update.tensors.shards import check_dense
from tidemill_weight_update.tensors.source import checked_item

Pair = tuple[Tensor, Tensor]


def pairs_of(named_tensors: Iterable[tuple[str, Tensor]], config: LoraConfig) -> dict[str, Pair]:
    """Return by layer A [r, inputs] and B [outputs, r], unchanged, in the order of the layers.

    Raises:
        TypeError: an item is not a `(name, tensor)` pair, is a LocalShard, or has no dense storage.
        ValueError: there are none, a matrix is passed twice, has another shape, or lacks its counterpart, or `parse`
            raises.
    """
    seen: set[str] = set()
    found: dict[str, dict[str, Tensor]] = {}
    for item in named_tensors:
        name, tensor = checked_item(item, seen)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name!r} is a LocalShard; pass adapters as plain tensors or DTensors")
        check_dense(name, tensor)
        module, matrix = parse(name, config)
        if matrix in found.setdefault(module, {}):
            raise ValueError(f"{name!r}: matrix {matrix} of {module!r} was passed twice; pass one adapter at a time")
        if tensor.ndim != 2 or tensor.shape[0 if matrix == "A" else 1] != config.r:
            wanted = "(r, inputs)" if matrix == "A" else "(outputs, r)"
            raise ValueError(f"{name!r} must have the shape {wanted} with r={config.r}, got {tuple(tensor.shape)}")
        found[module][matrix] = tensor
    if not found:
        raise ValueError(
            "expected the tensors of an adapter, got an empty iterable; if it is a generator, create a new one"
        )
    for module, matrices in found.items():
        for matrix in ("A", "B"):
            if matrix not in matrices:
                raise ValueError(
                    f"the adapter lacks {saved_name(module, matrix)!r}, the second matrix of its layer; pass both"
                )
    return {module: (matrices["A"], matrices["B"]) for module, matrices in found.items()}
