"""Images and videos of vision-language models: the column `multi_modal_inputs`, and 3-D positions."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.model_io import VisionInputs

COLUMN = "multi_modal_inputs"
MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_OTHERS = ("second_per_grid_ts",)
_KNOWN = (*_PIXELS.values(), *_GRIDS.values(), *_OTHERS)
_TOKEN_TYPES = {"image": 1, "video": 2}

RopeIndex = Callable[..., tuple[torch.Tensor, Any]]
"""transformers' `get_rope_index` of a model; returns the positions [3, 1, j] of a row first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionRule:
    """How images and videos become tokens in a model of the Qwen-VL families.

    Attributes:
        token_ids: ids of the placeholder tokens, by "image" and "video".
        merge_size: side length, in patches, of the square that becomes one token.
        patch_size: number of elements of a patch.
        rope_index: the model's rule for positions, for rows without `position_ids`.
    """

    token_ids: Mapping[str, int]
    merge_size: int
    patch_size: int
    rope_index: RopeIndex = field(repr=False)

    @classmethod
    def of(cls, config: Any, rope_index: RopeIndex) -> "VisionRule":
        """Create the rule from the configuration of a model whose `model_type` is one of `MODEL_TYPES`."""
        vision = config.vision_config
        return cls(
            token_ids={"image": config.image_token_id, "video": config.video_token_id},
            merge_size=vision.spatial_merge_size,
            patch_size=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
            rope_index=rope_index,
        )

    def check(self, batch: DataProto) -> None:
        """Check `multi_modal_inputs`, the placeholder tokens of each row, and `position_ids` if present.

        Raises:
            ValueError, TypeError: an invalid row; the message names it.
        """
        tokens = batch["input_ids"]
        expected = {kind: torch.zeros(len(batch), dtype=torch.int64) for kind in _PIXELS}
        for row, entries in rows_with_images(batch):
            for kind in _PIXELS:
                expected[kind][row] = self._num_tokens(entries, kind, f"{COLUMN} of row {row}")
        for kind, token_id in self.token_ids.items():
            is_placeholder = (ragged.values(tokens) == token_id).long()
            found = ragged.segment_sum(is_placeholder, tokens)
            if (found != expected[kind]).any():
                row = int((found != expected[kind]).nonzero()[0])
                raise ValueError(
                    f"row {row} of input_ids has the {kind} token {token_id} {int(found[row])} times, but the {kind}s "
                    f"in its {COLUMN} have {int(expected[kind][row])} tokens; they must be equal"
                )
        if "position_ids" in _tensor_columns(batch):
            _check_positions(batch["position_ids"], tokens)

    def _num_tokens(self, entries: Mapping[str, torch.Tensor], kind: str, where: str) -> int:
        """Return the number of tokens of a row's images after checking them."""
        pixels, grid = entries.get(_PIXELS[kind]), entries.get(_GRIDS[kind])
        if pixels is None and grid is None:
            return 0
        if pixels is None or grid is None:
            raise ValueError(f"{where} must have both {_PIXELS[kind]} and {_GRIDS[kind]}, or neither")
        if grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point() or (grid < 1).any():
            raise ValueError(
                f"{where}: {_GRIDS[kind]} must be integers >= 1 of shape [n, 3], got {grid.dtype} {tuple(grid.shape)}"
            )
        if (grid[:, 1:] % self.merge_size).any():
            raise ValueError(f"{where}: height and width in {_GRIDS[kind]} must be multiples of {self.merge_size}")
        wanted = (int(grid.prod(-1).sum()), self.patch_size)
        if pixels.shape != wanted or not pixels.is_floating_point():
            raise ValueError(
                f"{where}: {_PIXELS[kind]} must be floating-point of shape {wanted} for its {_GRIDS[kind]}, got "
                f"{pixels.dtype} {tuple(pixels.shape)}"
            )
        return wanted[0] // self.merge_size**2

    def prepare(self, micro_batch: DataProto, kinds: Collection[str]) -> VisionInputs:
        """Collect the images of a checked micro-batch, with a placeholder image for each of `kinds` that it lacks.

        With it the model computes the same layers as on ranks with images. The placeholder is black, has one token in
        an additional row, does not change any output, and its gradient is zero.
        """
        collected: dict[str, list[torch.Tensor]] = {}
        for _, entries in rows_with_images(micro_batch):
            for name, value in entries.items():
                collected.setdefault(name, []).append(value)
        placeholders: list[int] = []
        for kind in _PIXELS:
            if kind in kinds and _PIXELS[kind] not in collected:
                collected[_PIXELS[kind]] = [torch.zeros(self.merge_size**2, self.patch_size)]
                collected[_GRIDS[kind]] = [torch.tensor([[1, self.merge_size, self.merge_size]])]
                placeholders.append(self.token_ids[kind])
        positions = self._positions(micro_batch)
        return VisionInputs(
            tensors={name: torch.cat(values) for name, values in collected.items() if name not in _OTHERS},
            placeholders=placeholders,
            positions=torch.cat([positions, positions.new_zeros(len(placeholders), 3)]),
        )

    def _positions(self, micro_batch: DataProto) -> torch.Tensor:
        """Return the positions [N, 3]: the column `position_ids`, or those of the model's rule."""
        if "position_ids" in _tensor_columns(micro_batch):
            return ragged.values(micro_batch["position_ids"]).long()
        images = dict(rows_with_images(micro_batch))
        rows = [torch.zeros(0, 3, dtype=torch.int64)]
        for row, token_ids in enumerate(micro_batch["input_ids"].unbind()):
            entries = images.get(row)
            if entries is None:
                rows.append(torch.arange(len(token_ids)).unsqueeze(-1).expand(-1, 3))
                continue
            types = torch.zeros_like(token_ids, dtype=torch.int32)
            for kind, number in _TOKEN_TYPES.items():
                types[token_ids == self.token_ids[kind]] = number
            grids = {name: value for name, value in entries.items() if name not in _PIXELS.values()}
            positions, _ = self.rope_index(token_ids[None].long(), types[None], **grids)
            rows.append(positions[:, 0].T)
        return torch.cat(rows)


def kinds_in(batch: DataProto) -> frozenset[str]:
    """Return which of "image" and "video" the rows of a checked batch have."""
    present = {name for _, entries in rows_with_images(batch) for name in entries}
    return frozenset(kind for kind, name in _PIXELS.items() if name in present)


def rows_with_images(batch: DataProto) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Return index and tensors (on the CPU) of the rows whose `multi_modal_inputs` are neither None nor empty.

    Raises:
        TypeError: an element of the column is not a dict of tensors.
        ValueError: an element has an unknown entry.
    """
    column = batch.non_tensor_batch.get(COLUMN)
    rows = []
    for row, value in enumerate(() if column is None else column):
        if value is None:
            continue
        if not isinstance(value, dict):
            raise TypeError(f"{COLUMN} of row {row} must be a dict or None, got a {type(value).__name__}")
        entries = {}
        for name, item in value.items():
            if name not in _KNOWN:
                raise ValueError(f"{COLUMN} of row {row} has {name!r}; remove it. Supported: {', '.join(_KNOWN)}")
            if item is not None:
                if not isinstance(item, torch.Tensor):
                    raise TypeError(f"{COLUMN} of row {row}: {name} must be a tensor, got a {type(item).__name__}")
                entries[name] = item.cpu()
        if entries:
            rows.append((row, entries))
    return rows


def _tensor_columns(batch: DataProto) -> Collection[str]:
    return set() if batch.batch is None else set(map(str, batch.batch.keys()))


def _check_positions(column: torch.Tensor, tokens: torch.Tensor) -> None:
    if not ragged.is_ragged(column) or column.dim() != 3 or column.shape[2] != 3 or column.is_floating_point():
        shape = f"a ragged column of {column.dim()} dims" if ragged.is_ragged(column) else str(tuple(column.shape))
        raise TypeError(
            "position_ids of a vision-language model must be integers [B, j, 3] (time, height, width), ragged like "
            f"input_ids; got {column.dtype}, {shape}. Without the column, the engine computes them"
        )
    lengths, expected = ragged.lengths(column), ragged.lengths(tokens)
    if (lengths != expected).any():
        row = int((lengths != expected).nonzero()[0])
        raise ValueError(
            f"row {row} of position_ids has {int(lengths[row])} elements but input_ids {int(expected[row])}; they must "
            "be equal"
        )
