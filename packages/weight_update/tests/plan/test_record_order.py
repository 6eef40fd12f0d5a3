"""Elements that are written more than once are left to the loader; elements that nothing writes are reported."""

import random
from collections.abc import Mapping

import pytest
import torch
from tidemill_weight_update.plan.record import record
from tidemill_weight_update.tensors import SourceSpec
from torch import Tensor, nn
from toy_modules import FramedModule, Load, ToyModule, check_plan, replay, same, specs, state


def random_load(seed: int) -> tuple[dict[str, Tensor], Load, dict[str, Tensor]]:
    """Random load: copies, constants and in-place changes hit the same elements, in any order."""
    rng = random.Random(seed)
    sizes = {"p": (4, 5), "q": (6,)}
    tensors = {f"s{i}": torch.randn(4, 5) for i in range(rng.randint(1, 5))}
    steps: dict[str, list[tuple[str, str, tuple[slice, ...]]]] = {name: [] for name in ["before", *tensors, "after"]}
    for name in steps:
        kinds = ["copy"] * 6 + ([] if seed % 2 else ["fill", "scaled", "add", "add source"])
        if name not in tensors:
            kinds = ["fill"]
        for _ in range(rng.randint(0, 3 if name in tensors else seed % 3 // 2)):
            parameter = rng.choice(list(sizes))
            cut = tuple(slice(a := rng.randrange(n), rng.randint(a + 1, n)) for n in sizes[parameter])
            steps[name].append((rng.choice(kinds), parameter, cut))

    def load(parameters: Mapping[str, Tensor], name: str, tensor: Tensor) -> None:
        for kind, parameter, cut in steps[name]:
            place = parameters[parameter][cut]
            part = tensor[cut] if place.dim() == 2 else tensor.reshape(-1)[cut[0]]
            if kind == "copy":
                place.copy_(part)
            elif kind == "scaled":
                place.copy_(part * 2)
            elif kind == "fill":
                place.fill_(3)
            elif kind == "add":
                place.add_(1)
            else:
                place.add_(part)

    return {name: torch.empty(size) for name, size in sizes.items()}, load, tensors


@pytest.mark.parametrize("block", range(20))
def test_replay_of_random_writes_equals_the_load(block):
    for seed in range(block * 30, block * 30 + 30):
        parameters, load, tensors = random_load(seed)
        blank = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        reference, model = FramedModule(blank, load), FramedModule(blank, load)
        reference.load_weights(iter(tensors.items()))
        plan = record(model, specs(tensors))
        assert same(state(model), blank), seed
        replay(model, plan, tensors)
        assert same(state(model), state(reference)), seed


def overlapping(parameters, name, tensor):
    start, size = {"whole": (0, 6), "first": (0, 3), "last": (3, 3), "middle": (2, 2)}[name]
    parameters["p"].narrow(0, start, size).copy_(tensor)


@pytest.mark.parametrize("names", [("whole", "first", "last"), ("first", "last", "middle")])
def test_sources_that_overwrite_each_other_go_through_loader(names):
    sizes = {"whole": 6, "first": 3, "last": 3, "middle": 2}
    plan = check_plan({"p": torch.empty(6)}, overlapping, {name: torch.randn(sizes[name]) for name in names})
    assert (tuple(plan.through_loader), plan.copies) == (names, ())
    assert plan.through_loader[names[0]] == "elements of 'p' are written more than once"


def test_constant_that_a_source_overwrites_goes_through_loader():
    def load(parameters, name, tensor):
        if name == "p":
            parameters["p"].fill_(7)
            parameters["p"][:2].copy_(tensor)
        else:
            parameters["q"].copy_(tensor)

    plan = check_plan({"p": torch.empty(3), "q": torch.empty(3)}, load, {"p": torch.randn(2), "q": torch.randn(3)})
    assert (list(plan.through_loader), [copy.name for copy in plan.copies]) == (["p"], ["q"])
    assert plan.through_loader["p"] == "elements of 'p' are written more than once"


def test_parameter_changed_after_last_source_goes_through_loader():
    def load(parameters, name, tensor):
        if name == "after":
            parameters["p"].add_(1)
        elif name != "before":
            parameters[name].copy_(tensor)

    tensors = {"p": torch.randn(3), "q": torch.randn(3)}
    reference, model = (FramedModule({name: torch.zeros(3) for name in tensors}, load) for _ in range(2))
    reference.load_weights(iter(tensors.items()))
    plan = record(model, specs(tensors))
    assert (list(plan.through_loader), [copy.name for copy in plan.copies]) == (["p"], ["q"])
    replay(model, plan, tensors)
    assert same(state(model), state(reference))
    del tensors["p"]
    assert record(model, specs(tensors)).uncovered == {"p": 3}


def test_interleaved_rows_do_not_overlap():
    def load(parameters, name, tensor):
        parameters["p"][{"even": 0, "odd": 1}[name] :: 2].copy_(tensor)

    tensors = {"even": torch.randn(3000, 2), "odd": torch.randn(3000, 2)}
    plan = check_plan({"p": torch.empty(6000, 2)}, load, tensors)
    assert (len(plan.copies), plan.through_loader, plan.uncovered) == (2, {}, {})
    del tensors["odd"]
    assert check_plan({"p": torch.empty(6000, 2)}, load, tensors).uncovered == {"p": 6000}


def test_sources_of_too_scattered_writes_go_through_loader(monkeypatch):
    monkeypatch.setattr("tidemill_weight_update.plan.record.MAX_RUNS", 10)
    parameters = {"p": torch.empty(20, 2), "q": torch.empty(20, 2)}
    tensors = {"p": torch.randn(10, 2), "q": torch.randn(10, 2)}

    def load(parameters, name, tensor):
        for start in range(2) if name == "p" else range(1):
            parameters[name][start::2].copy_(tensor)

    model = ToyModule(parameters, load)
    plan = record(model, specs(tensors))
    assert plan.through_loader == {"p": "the writes to 'p' are too scattered to check"}
    assert ([copy.name for copy in plan.copies], plan.uncovered) == (["q"], {"q": 20})


def test_coverage_of_non_contiguous_parameter_is_exact():
    def load(parameters, name, tensor):
        parameters["p"].narrow(1, int(name), 2).copy_(tensor)

    blank = torch.zeros(4, 8)[:, :5]
    model = ToyModule({}, load)
    model.register_parameter("p", nn.Parameter(blank, requires_grad=False))
    plan = record(model, [SourceSpec(name, (4, 2), torch.float32) for name in ("0", "3")])
    assert (plan.uncovered, plan.through_loader, len(plan.copies)) == ({"p": 4}, {}, 2)
    plan = record(model, [SourceSpec(name, (4, 2), torch.float32) for name in ("0", "1", "3")])
    assert (plan.uncovered, list(plan.through_loader), plan.copies) == ({}, ["0", "1", "3"], ())


def test_parameters_that_share_memory_are_covered_together():
    def load(parameters, name, tensor):
        parameters["p"].copy_(tensor)

    model = ToyModule({"p": torch.zeros(3)}, load)
    model.register_parameter("again", nn.Parameter(model.get_parameter("p").data, requires_grad=False))
    model.register_parameter("tied", model.get_parameter("p"))
    plan = record(model, [SourceSpec("a", (3,), torch.float32)])
    assert ([copy.parameter for copy in plan.copies], plan.uncovered) == (["p"], {})


def test_parameters_may_share_one_storage():
    block = torch.zeros(10)
    model = ToyModule({}, lambda p, name, t: p[name].copy_(t))
    for name, start, size in (("p", 0, 4), ("q", 4, 6)):
        model.register_parameter(name, nn.Parameter(block[start : start + size], requires_grad=False))
    plan = record(model, [SourceSpec("q", (6,), torch.float32)])
    assert [(copy.parameter, copy.offset) for copy in plan.copies] == [("q", 0)]
    assert plan.uncovered == {"p": 4}
