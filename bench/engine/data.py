"""Rows to train on: seeded, of lengths that spread evenly on a logarithmic scale."""

import torch
from tidemill_dataproto import DataProto, ragged

SHORTEST, LONGEST = 512, 8192
TINY_SHORTEST, TINY_LONGEST = 8, 64


def row_lengths(total: int, *, shortest: int, longest: int, seed: int) -> list[int]:
    """Lengths that add up to about `total`: log-uniform between `shortest` and `longest`, as of sampled responses."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) + shortest <= total:
        drawn = shortest * (longest / shortest) ** torch.rand((), generator=generator).item()
        lengths.append(min(round(drawn), total - sum(lengths)))
    return lengths


def make_batch(lengths: list[int], vocab_size: int, *, seed: int) -> DataProto:
    """Rows of `lengths` random tokens, of which one eighth is the prompt; every response token is trained on."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    tokens = ragged.ragged(torch.randint(3, vocab_size, (int(counts.sum()),), generator=generator), counts)
    _, responses = ragged.split_rows(tokens, (counts // 8).clamp(min=1))
    mask = ragged.like(torch.ones(len(ragged.values(responses)), dtype=torch.int64), responses)
    return DataProto.from_dict({"input_ids": tokens, "responses": responses, "response_mask": mask})


def warm_up_rows(lengths: list[int], micro_tokens: int) -> list[int]:
    """The first rows, enough for two full micro-batches: what they allocate and compile, the steps find ready."""
    count, total = 0, 0
    while count < len(lengths) and total < 2 * micro_tokens:
        total += lengths[count]
        count += 1
    return lengths[:count]
