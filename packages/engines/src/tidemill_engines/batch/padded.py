"""Convert padded batches to ragged ones for the engine, and its outputs back."""

import torch
from tidemill_dataproto import DataProto, ragged


def is_padded(batch: DataProto) -> bool:
    """Return whether `input_ids` is a plain tensor [B, T] with an `attention_mask`."""
    if batch.batch is None or not {"input_ids", "responses", "attention_mask"} <= set(batch.batch.keys()):
        return False
    return not ragged.is_ragged(batch["input_ids"]) and not ragged.is_ragged(batch["attention_mask"])


def response_attention_mask(batch: DataProto) -> torch.Tensor:
    """Return the last R columns [B, R] of `attention_mask` [B, T], the mask of the padded `responses` [B, R].

    Raises:
        ValueError: the shapes of `input_ids`, `attention_mask` and `responses` do not match.
    """
    tokens, mask, responses = batch["input_ids"], batch["attention_mask"], batch["responses"]
    shapes = f"input_ids {_shape(tokens)}, attention_mask {_shape(mask)}, responses {_shape(responses)}"
    if ragged.is_ragged(responses) or tokens.dim() != 2 or mask.shape != tokens.shape or responses.dim() != 2:
        raise ValueError(
            f"expected padded input_ids [B, T], attention_mask [B, T] and responses [B, R], or all of them ragged; "
            f"got {shapes}; pad or convert all three"
        )
    if responses.shape[1] >= tokens.shape[1]:
        raise ValueError(f"input_ids must be prompt + response, longer than responses; got {shapes}")
    return mask[:, tokens.shape[1] - responses.shape[1] :]


def to_ragged(batch: DataProto) -> DataProto:
    """Remove the padding of a padded batch.

    Plain columns [B, T, ...] become ragged by `attention_mask`, plain columns [B, R, ...] by its last R columns; the
    mask itself is removed. Other columns are unchanged.

    Raises:
        ValueError: as `response_attention_mask`.
    """
    of_responses, of_all = response_attention_mask(batch), batch["attention_mask"]
    assert batch.batch is not None
    masks = {mask.shape: mask for mask in (of_responses, of_all)}
    columns: dict[str, torch.Tensor] = {}
    for name in map(str, batch.batch.keys()):
        if name != "attention_mask":
            column = batch[name]
            mask = None if ragged.is_ragged(column) else masks.get(column.shape[:2])
            columns[name] = column if mask is None else ragged.from_padded(column, mask)
    return DataProto.from_dict(columns, batch.non_tensor_batch, batch.meta_info)


def to_padded(column: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Invert `ragged.from_padded(padded, mask)`: return [B, R, ...] with zeros where the mask [B, R] is 0."""
    flat = ragged.values(column)
    padded = flat.new_zeros((*mask.shape, *flat.shape[1:]))
    padded[mask.bool()] = flat
    return padded


def _shape(tensor: torch.Tensor) -> str:
    return "ragged" if ragged.is_ragged(tensor) else str(tuple(tensor.shape))
