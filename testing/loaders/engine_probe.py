"""Looks at an engine's parameters from inside its scheduler, as a `custom_weight_loader` of stock SGLang."""

import torch


def dump(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Saves all parameters to the file that the one tensor is named after."""
    ((path, _),) = named_tensors
    torch.save({name: parameter.detach().cpu() for name, parameter in model.named_parameters()}, path)


def scramble(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Overwrites all parameters, so that one that is not loaded afterwards is noticed."""
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
