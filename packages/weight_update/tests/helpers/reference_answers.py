"""What transformers says of the answers of an engine."""

import torch


def state(model) -> list[tuple[str, torch.Tensor]]:
    return list(model.state_dict().items())


def most_likely(model, prompt: list[int], tokens: list[int]) -> list[int]:
    """What `model` would have answered to `prompt` in the place of each of `tokens`, given those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()
