"""Operations on an engine's parameters inside its processes, run as a `custom_weight_loader` of stock SGLang."""

import json
from pathlib import Path

import torch

LOADER = "weight_update.probe.handle"
SCRAMBLED = 7.0

# SGLang calls `handle` by name, so its state is stored here.
_remembered: dict[str, torch.Tensor] = {}


def handle(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Run the operation named by the single tensor's name, `{"operation", "folder"}`, and write its result to the
    folder.

    nothing: round trip only. remember: keep a copy of all parameters. scramble: overwrite them. compare: list the
    parameters that differ from the copy. forget: free the copy.
    """
    from sglang.srt.distributed import get_tensor_model_parallel_rank

    ((text, _),) = named_tensors
    request = json.loads(text)
    answer = _OPERATIONS[request["operation"]](model)
    Path(request["folder"], f"answer{get_tensor_model_parallel_rank()}.json").write_text(json.dumps(answer))


def _remember(model: torch.nn.Module) -> int:
    _remembered.update((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
    return sum(tensor.nbytes for tensor in _remembered.values())


def _scramble(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(SCRAMBLED)


def _compare(model: torch.nn.Module) -> list[str]:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == _remembered.keys(), "call remember before compare"
    return [name for name, known in _remembered.items() if not torch.equal(_bytes(known), _bytes(parameters[name]))]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, because float8 tensors cannot be compared."""
    return tensor.detach().contiguous().view(torch.uint8)


def _forget(model: torch.nn.Module) -> None:
    _remembered.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_OPERATIONS = {
    "nothing": lambda model: None,
    "remember": _remember,
    "scramble": _scramble,
    "compare": _compare,
    "forget": _forget,
}
