"""Access to an engine's parameters from inside its scheduler, as a `custom_weight_loader` of stock SGLang."""

import torch


def dump(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Save all parameters to a file; the name of the only tensor is its path."""
    ((path, _),) = named_tensors
    torch.save({name: parameter.detach().cpu() for name, parameter in model.named_parameters()}, path)


def scramble(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Overwrite all parameters, so that a test detects one that is not loaded afterwards."""
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
