"""A batch, and operations on it that must not read from its device."""

from collections.abc import Callable

import torch
from tidemill_dataproto import DataProto, pad_dataproto_to_divisor, ragged, rearrange_micro_batches

LENGTHS = [3, 0, 700, 1, 900, 2, 5, 0]
_EMPTY_ROWS = dict.fromkeys(["input_ids", "response_mask", "position_ids"])

OPERATIONS: dict[str, Callable[[DataProto], DataProto]] = {
    "chunk": lambda b: b.chunk(3, allow_unequal=True)[1],
    "split": lambda b: b.split(3)[2],
    "slice": lambda b: b[2:5],
    "index": lambda b: b[[4, 2, 2, 1]],
    "mask": lambda b: b[[True, False] * 4],
    "reorder": lambda b: b.reorder([7, 6, 5, 4, 3, 2, 1, 0]),
    "repeat": lambda b: b.repeat(2),
    "repeat by row": lambda b: b.sample_level_repeat([2, 0, 1, 3, 0, 1, 1, 1]),
    "concat": lambda b: DataProto.concat([b, b]),
    "concat with fill": lambda b: DataProto.concat([b, b.select(["x"])], fill=_EMPTY_ROWS),
    "union": lambda b: b.select(["x"]).union(b.select(["input_ids"])),
    "rename": lambda b: b.rename("x", "y"),
    "clone": lambda b: b.clone(),
    "fold": lambda b: b.fold(2).unfold(),
    "pad": lambda b: pad_dataproto_to_divisor(b, 3)[0],
    "micro-batches": lambda b: rearrange_micro_batches(b, 1000)[0][0],
    "iterator": lambda b: next(b.make_iterator(3, seed=1)),
    "items": lambda b: DataProto.from_items(list(b), ["x"]),
}


def host_batch() -> DataProto:
    """Columns of two layouts, with rows that are copied in blocks and empty ones, and dense ones."""
    size = sum(LENGTHS)
    ids = ragged.ragged(torch.arange(size), LENGTHS)
    tensors = {
        "input_ids": ids,
        "response_mask": ragged.like(torch.ones(size), ids),
        "position_ids": ragged.ragged(torch.arange(3 * 16).reshape(16, 3), [2] * 8),
        "x": torch.arange(32.0).reshape(8, 4),
    }
    return DataProto.from_dict(tensors, {"uid": [f"u{i}" for i in range(8)]}, {"step": 1})


def on_device(device: str) -> DataProto:
    """The same on a device, after its TensorDict has been requested."""
    batch = host_batch().to(device)
    _ = batch.batch
    return batch


def index_arithmetic(batch: DataProto) -> list[torch.Tensor]:
    """Results of all functions of ragged columns that only move elements."""
    ids, mask = batch["input_ids"], batch["response_mask"]
    first, second = ragged.split_rows(ids, [length // 2 for length in LENGTHS])
    outputs = ragged.concat_rows(batch["position_ids"], batch["position_ids"])
    padded = ragged.to_padded(ids, -1, side="left")
    return [
        ragged.values(ragged.concat_rows(first, second)),
        ragged.values(ragged.response_predictions(outputs, batch["position_ids"])),
        ragged.values(ragged.index_rows(ids, [2, 4])),
        ragged.values(ragged.from_padded(padded, lengths=LENGTHS, side="left")),
        ragged.to_prompt_response(first, second, 0),
        ragged.expand_rows(batch["x"], ids),
        ragged.segment_sum(ragged.values(ids), ids),
        ragged.values(ragged.ragged(ragged.values(ids), LENGTHS)),
        (ids * mask).values(),
        padded,
    ]


def sums(batch: DataProto) -> list[torch.Tensor]:
    """The functions that add up numbers with a fraction."""
    ids, mask = batch["input_ids"], batch["response_mask"]
    return [
        ragged.segment_mean(ragged.values(ids), ids),
        ragged.segment_sum(ragged.values(mask), mask),
    ]
