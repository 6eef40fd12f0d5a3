"""Training rows: seeded, with log-uniform lengths."""

import torch
from tidemill_dataproto import DataProto, balance_rows, ragged

SHORTEST, LONGEST = 512, 8192
TINY_SHORTEST, TINY_LONGEST = 8, 64


def row_lengths(total: int, *, shortest: int, longest: int, seed: int) -> list[int]:
    """Draw lengths with a sum of about `total`, log-uniform between `shortest` and `longest`."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) + shortest <= total:
        drawn = shortest * (longest / shortest) ** torch.rand((), generator=generator).item()
        lengths.append(min(round(drawn), total - sum(lengths)))
    return lengths


def divide_rows(lengths: list[int], num_parts: int) -> list[list[int]]:
    """Divide rows among data-parallel ranks as tidemill-trainer does: equal numbers of rows, about equal tokens."""
    return [[lengths[row] for row in part] for part in balance_rows(lengths, num_parts).tensor_split(num_parts)]


def count_outputs(lengths: list[int]) -> int:
    """Count the response tokens of the rows of `make_batch`."""
    return sum(length - _prompt_length(length) for length in lengths)


def _prompt_length(length: int) -> int:
    return max(length // 8, 1)


def make_batch(
    lengths: list[int], vocab_size: int, *, seed: int, experts: tuple[int, int, int] | None = None
) -> DataProto:
    """Create rows of `lengths` random tokens, one eighth of them prompt; every response token is trained.

    Args:
        experts: number of layers, of experts per layer and of experts per token, for a column of random experts.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    tokens = ragged.ragged(torch.randint(3, vocab_size, (int(counts.sum()),), generator=generator), counts)
    _, responses = ragged.split_rows(tokens, torch.tensor([_prompt_length(length) for length in lengths]))
    mask = ragged.like(torch.ones(len(ragged.values(responses)), dtype=torch.int64), responses)
    columns = {"input_ids": tokens, "responses": responses, "response_mask": mask}
    if experts is not None:
        chosen = _random_experts(int(counts.sum()), *experts, generator=generator)
        columns["routed_experts"] = ragged.like(chosen, tokens)
    return DataProto.from_dict(columns)


def _random_experts(
    num_tokens: int, num_layers: int, num_experts: int, top_k: int, *, generator: torch.Generator
) -> torch.Tensor:
    """Draw different experts for each token and layer, int32 [n, L, K]: equidistant modulo the number of experts."""
    assert num_experts & (num_experts - 1) == 0, "odd distances reach all experts only for a power of two"
    size = (num_tokens, num_layers, 1)
    first, step = (torch.randint(num_experts, size, generator=generator, dtype=torch.int32) for _ in range(2))
    return (first + torch.arange(top_k, dtype=torch.int32) * (step | 1)) % num_experts


def warm_up_rows(lengths: list[int], micro_tokens: int) -> list[int]:
    """Return the first rows, enough for two full micro-batches, to allocate memory and compile before the steps."""
    count, total = 0, 0
    while count < len(lengths) and total < 2 * micro_tokens:
        total += lengths[count]
        count += 1
    return lengths[:count]
