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


def make_batch(
    lengths: list[int], vocab_size: int, *, seed: int, experts: tuple[int, int, int] | None = None
) -> DataProto:
    """Rows of `lengths` random tokens, of which one eighth is the prompt; every response token is trained on.

    Args:
        experts: layers, experts of each, and how many of them a token is sent to: a column says to which, in equal
            numbers but for chance.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    tokens = ragged.ragged(torch.randint(3, vocab_size, (int(counts.sum()),), generator=generator), counts)
    _, responses = ragged.split_rows(tokens, (counts // 8).clamp(min=1))
    mask = ragged.like(torch.ones(len(ragged.values(responses)), dtype=torch.int64), responses)
    columns = {"input_ids": tokens, "responses": responses, "response_mask": mask}
    if experts is not None:
        chosen = _random_experts(int(counts.sum()), *experts, generator=generator)
        columns["routed_experts"] = ragged.like(chosen, tokens)
    return DataProto.from_dict(columns)


def _random_experts(
    num_tokens: int, num_layers: int, num_experts: int, top_k: int, *, generator: torch.Generator
) -> torch.Tensor:
    """Different ones for each token and layer, int32 [n, L, K]: at equal distances on the circle of all experts."""
    assert num_experts & (num_experts - 1) == 0, "odd distances lead to all experts if these are a power of two"
    size = (num_tokens, num_layers, 1)
    first, step = (torch.randint(num_experts, size, generator=generator, dtype=torch.int32) for _ in range(2))
    return (first + torch.arange(top_k, dtype=torch.int32) * (step | 1)) % num_experts


def warm_up_rows(lengths: list[int], micro_tokens: int) -> list[int]:
    """The first rows, enough for two full micro-batches: what they allocate and compile, the steps find ready."""
    count, total = 0, 0
    while count < len(lengths) and total < 2 * micro_tokens:
        total += lengths[count]
        count += 1
    return lengths[:count]
