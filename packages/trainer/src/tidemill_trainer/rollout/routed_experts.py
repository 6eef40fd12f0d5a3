"""The experts that SGLang sent tokens to, as the column that training replays."""

import base64
from collections.abc import Sequence

import numpy as np
import torch
from tidemill_dataproto import ragged

COLUMN = "routed_experts"
_FREE = -1  # the router of the training engine chooses


def routed_experts_column(
    encoded: Sequence[str], input_ids: torch.Tensor, *, num_layers: int, top_k: int
) -> torch.Tensor:
    """Makes the column `routed_experts` of SGLang's answers to requests with `return_routed_experts`.

    SGLang has the experts of every token that the model has read: of the prompt, also where the prefix cache had it,
    and of the response but for its last token, which it never reads. That one is left to the router.

    Args:
        encoded: for each row `meta_info["routed_experts"]`, base64 of int32 [tokens - 1, L, K].
        input_ids: ragged [B, j], prompt and response.
        num_layers, top_k: L and K; layers without experts are counted, and hold zeros.

    Returns:
        Ragged int32 [B, j, L, K], for each token of `input_ids`; -1 where it is not known.

    Raises:
        ValueError: a row has experts of another number of tokens.
    """
    rows = []
    for number, (text, length) in enumerate(zip(encoded, ragged.host_lengths(input_ids), strict=True)):
        experts = np.frombuffer(base64.b64decode(text), dtype=np.int32)
        expected = (int(length) - 1, num_layers, top_k)
        if experts.size != np.prod(expected):
            raise ValueError(
                f"row {number}: expected SGLang's experts of {expected[0]} tokens, {num_layers} layers and {top_k} "
                f"experts a token; got {experts.size} numbers"
            )
        last = np.full((1, num_layers, top_k), _FREE, dtype=np.int32)
        rows.append(np.concatenate([experts.reshape(expected), last]))
    values = np.concatenate(rows) if rows else np.empty((0, num_layers, top_k), dtype=np.int32)
    return ragged.like(torch.from_numpy(values), input_ids)
