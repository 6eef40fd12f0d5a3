"""Map the tensors of a checkpoint to the tensors of a model, which may fuse several, such as those of experts."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from tidemill_engines.config import Dtype
from tidemill_engines.hf_weights.safetensors_files import COMPUTED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A tensor of the checkpoint as a box in a tensor of the model.

    Attributes:
        name: name in the checkpoint.
        start: index of the first element of the box, for each dimension of the model's tensor.
        shape: shape of the box.
        stacked: whether the model's tensor has a first dimension that the checkpoint's lacks; the box has length 1
            there.
    """

    name: str
    start: Shape
    shape: Shape
    stacked: bool = False

    def overlap(self, start: Shape, shape: Shape) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return the overlap with another box of the model's tensor, such as a rank's shard.

        Returns:
            The region of the checkpoint's tensor and the region of the other box; None if they do not overlap.
        """
        low = [max(a, b) for a, b in zip(self.start, start, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, start, shape, strict=True)]
        if any(b <= a for a, b in zip(low, high, strict=True)):
            return None
        own = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, self.start, strict=True))
        other = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
        return own[1:] if self.stacked else own, other


Layout = dict[str, tuple[Piece, ...]]
"""The pieces of each tensor of the model, by its name in the model; they fill it completely."""


def plan_layout(
    model: "PreTrainedModel",
    wanted: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    found: Mapping[str, Shape],
    *,
    absent: Iterable[str] = (),
    unused: Iterable[str] = (),
) -> Layout:
    """Find the checkpoint's tensors for each tensor of the model, by transformers' weight conversions.

    Args:
        wanted: tensors of the model by name, tied ones once.
        aliases: other names of tied tensors, to the name in `wanted`.
        found: shapes of the checkpoint's tensors.
        absent: names in `wanted` that the checkpoint may lack, such as a new head.
        unused: names of the checkpoint that the model may lack, such as a replaced head.

    Raises:
        ValueError: a tensor is missing, unexpected or of another shape, or its conversion is not supported.
    """
    conversions = get_model_conversion_mapping(model)
    converters = [item for item in conversions if isinstance(item, WeightConverter)]
    renamings: list[Any] = [item for item in conversions if not isinstance(item, WeightConverter)]
    known = dict.fromkeys([*wanted, *aliases], True)
    sources: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(found, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        sources[target][pattern].append(name)
    for alias, name in aliases.items():  # a checkpoint may contain a tied tensor under either name, or both
        stored = sources.pop(alias, None)
        if stored is not None and name not in sources:
            sources[name] = stored
    layout, missing = {}, []
    for name, tensor in wanted.items():
        if name in sources:
            layout[name] = _pieces(name, tuple(tensor.shape), sources.pop(name), converters, found)
        elif name not in set(absent):
            missing.append(name)
    ignored = [COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ()), *(re.escape(name) for name in unused)]
    left_over = [
        name
        for by_pattern in sources.values()
        for names in by_pattern.values()
        for name in names
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    if missing or left_over:
        raise ValueError(
            f"the checkpoint does not match {type(model).__name__}: "
            + "; ".join(
                f"{what} {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
                for what, names in (("it lacks", missing), ("the model does not have", left_over))
                if names
            )
            + "; use config.json and weights of the same model"
        )
    return layout


def stored_bytes(
    weights: Iterable[tuple[str, torch.Tensor]], layout: Layout, dtype: Dtype | None
) -> list[tuple[str, int]]:
    """Return names and bytes of the checkpoint's tensors of a model, in order.

    Args:
        weights: tensors of the model by name; their values are not read.
        dtype: dtype of parameters in the checkpoint; None keeps theirs. Buffers keep it.
    """
    sizes = []
    for name, weight in weights:
        item = weight.element_size()
        if dtype is not None and isinstance(weight, torch.nn.Parameter):
            item = getattr(torch, dtype).itemsize
        parts = [(piece.name, piece.shape) for piece in layout.get(name, ())] or [(name, weight.shape)]
        sizes += [(stored, math.prod(shape) * item) for stored, shape in parts]
    return sizes


def checkpoint_shapes(model: "PreTrainedModel") -> dict[str, Shape]:
    """Return the shapes of the tensors of a checkpoint of a model on the meta device, by name in the checkpoint."""
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _pieces(
    name: str,
    shape: Shape,
    sources: Mapping[str | None, list[str]],
    converters: list[WeightConverter],
    found: Mapping[str, Shape],
) -> tuple[Piece, ...]:
    pattern = next(iter(sources))
    if pattern is None:
        if len(sources) > 1 or len(sources[None]) != 1:
            everything = sorted(name for names in sources.values() for name in names)
            raise ValueError(
                f"the checkpoint contains {name} more than once, as {', '.join(everything)}; remove all but one"
            )
        pieces = [Piece(name=sources[None][0], start=(0,) * len(shape), shape=found[sources[None][0]])]
    else:
        converter = next(item for item in converters if pattern in item.source_patterns)
        pieces = _fused(name, sources, converter, found)
    _check_filled(name, shape, pieces)
    return tuple(pieces)


def _fused(
    name: str, sources: Mapping[str | None, list[str]], converter: WeightConverter, found: Mapping[str, Shape]
) -> list[Piece]:
    """Return the pieces of a tensor that is stacked from modules (dimension 0), concatenated from several, or both."""
    operations = list(converter.operations)
    stacked = bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
    rest = operations[1:] if stacked else operations
    joins = [operation for operation in rest if isinstance(operation, Concatenate)]
    if len(rest) > 1 or len(joins) != len(rest):
        raise ValueError(
            f"transformers converts {name} with {operations}, which cannot be read by slices; only stacking along "
            "dimension 0 and concatenation are supported. Save the checkpoint in the layout of transformers' model"
        )
    dim = joins[0].dim if joins else 0
    pieces, offset = [], 0
    for pattern in converter.source_patterns:
        names = sources.get(pattern, [])
        width = 0
        for number, source in enumerate(names):
            box = (1, *found[source]) if stacked else found[source]
            start = [0] * len(box)
            start[0] = number if stacked else 0
            if joins:
                start[dim] += offset
                width = box[dim]
            pieces.append(Piece(name=source, start=tuple(start), shape=box, stacked=stacked))
        offset += width
    return pieces


def _check_filled(name: str, shape: Shape, pieces: list[Piece]) -> None:
    fits = all(
        len(piece.shape) == len(shape)
        and all(a + n <= size for a, n, size in zip(piece.start, piece.shape, shape, strict=True))
        for piece in pieces
    )
    if not fits or sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
        stored = ", ".join(
            f"{piece.name} {list(piece.shape[1:] if piece.stacked else piece.shape)}" for piece in pieces[:3]
        )
        raise ValueError(
            f"{name} has shape {list(shape)} in the model, but the checkpoint has {stored}"
            + (f" and {len(pieces) - 3} more" if len(pieces) > 3 else "")
            + "; use config.json and weights of the same model"
        )
