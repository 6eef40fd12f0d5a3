"""Greedy tokens by transformers, to compare the answers of an engine with."""

import torch


def state(model) -> list[tuple[str, torch.Tensor]]:
    return list(model.state_dict().items())


def most_likely(model, prompt: list[int], tokens: list[int]) -> list[int]:
    """Greedy token of `model` at each position of `tokens`, given `prompt` and the tokens before it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()
