"""Small modules whose `load_weights` is a given function, and the checks of their recorded plans."""

from collections.abc import Callable, Iterable, Mapping

import torch
from tidemill_weight_update.plan.plan import CopyPlan
from tidemill_weight_update.plan.record import record
from tidemill_weight_update.receive.plan_cache import write_fills
from tidemill_weight_update.tensors import SourceSpec
from torch import Tensor, nn

Load = Callable[[Mapping[str, Tensor], str, Tensor], None]


class ToyModule(nn.Module):
    """Module that loads each source with `load(parameters, name, tensor)`."""

    def __init__(self, parameters: Mapping[str, Tensor], load: Load) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            data = torch.empty_like(tensor).copy_(tensor)  # keeps the strides of `tensor`
            self.register_parameter(name, nn.Parameter(data, requires_grad=False))
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.load({key: parameter.data for key, parameter in self.named_parameters()}, name, tensor)


def specs(tensors: Mapping[str, Tensor]) -> list[SourceSpec]:
    return [SourceSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].nan_to_num(-99), b[name].nan_to_num(-99)) for name in a)


def replay(model: nn.Module, plan: CopyPlan, tensors: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    write_fills(parameters, plan.fills)
    for copy in plan.copies:
        parameter = parameters[copy.parameter].data
        source = tensors[copy.name][tuple(slice(a, a + n) for a, n in zip(copy.box.start, copy.box.shape, strict=True))]
        parameter.as_strided(copy.box.shape, copy.strides, parameter.storage_offset() + copy.offset).copy_(source)
    if plan.through_loader:
        model.load_weights((name, tensors[name]) for name in plan.through_loader)  # pyright: ignore


def check_plan(parameters: Mapping[str, Tensor], load: Load, tensors: Mapping[str, Tensor]) -> CopyPlan:
    """Record a plan, and check that its replay equals the module's own load. Elements that nothing writes stay NaN."""
    blank = {name: torch.full_like(parameter, float("nan")) for name, parameter in parameters.items()}
    reference, model = ToyModule(blank, load), ToyModule(blank, load)
    reference.load_weights(iter(tensors.items()))
    before = state(model)
    plan = record(model, specs(tensors))
    with torch.inference_mode():  # as SGLang's schedulers do
        assert record(model, specs(tensors)) == plan
    assert same(state(model), before)
    replay(model, plan, tensors)
    assert same(state(model), state(reference))
    empty = {name: int(value.isnan().sum()) for name, value in state(reference).items()}
    assert plan.uncovered == {name: count for name, count in empty.items() if count}
    assert not {copy.name for copy in plan.copies} & plan.through_loader.keys()
    return plan


class FramedModule(ToyModule):
    """Module that also writes before the first source and after the last one."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights([("before", torch.empty(4, 5))])
        super().load_weights(weights)
        super().load_weights([("after", torch.empty(4, 5))])
