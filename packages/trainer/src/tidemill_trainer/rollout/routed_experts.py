"""The experts that SGLang chose for each token, as the column that router replay uses."""

import base64
from collections.abc import Sequence

import numpy as np
import torch
from tidemill_dataproto import ragged

COLUMN = "routed_experts"
_UNKNOWN = -1  # the router of the training engine chooses the experts


def routed_experts_column(
    encoded: Sequence[str], input_ids: torch.Tensor, *, num_layers: int, top_k: int
) -> torch.Tensor:
    """Create the column `routed_experts` from SGLang's responses to requests with `return_routed_experts`.

    SGLang returns the experts of all tokens that the model has processed, including prompt tokens in the prefix cache.
    The model never processes the last token of a response, so its experts are unknown.

    Args:
        encoded: `meta_info["routed_experts"]` of each row, base64 of int32 [tokens - 1, L, K].
        input_ids: ragged [B, j], prompt and response.
        num_layers: L, including layers without experts, whose values are zeros.
        top_k: K, experts per token.

    Returns:
        Ragged int32 [B, j, L, K] for each token of `input_ids`; -1 for unknown experts.

    Raises:
        ValueError: the number of experts of a row does not match its number of tokens.
    """
    rows = []
    for number, (text, length) in enumerate(zip(encoded, ragged.host_lengths(input_ids), strict=True)):
        experts = np.frombuffer(base64.b64decode(text), dtype=np.int32)
        expected = (int(length) - 1, num_layers, top_k)
        if experts.size != np.prod(expected):
            raise ValueError(
                f"row {number}: expected {np.prod(expected)} expert ids from SGLang ({expected[0]} tokens x "
                f"{num_layers} layers x {top_k} experts), got {experts.size}; check that both use the same "
                "model"
            )
        last = np.full((1, num_layers, top_k), _UNKNOWN, dtype=np.int32)
        rows.append(np.concatenate([experts.reshape(expected), last]))
    values = np.concatenate(rows) if rows else np.empty((0, num_layers, top_k), dtype=np.int32)
    return ragged.like(torch.from_numpy(values), input_ids)
