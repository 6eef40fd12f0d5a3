"""Recorded plans of small modules: a replay gives the same parameters as the module's own `load_weights`."""

import concurrent.futures

import pytest
import torch
from tidemill_weight_update.copy.table import Copy
from tidemill_weight_update.plan.record import record
from tidemill_weight_update.tensors import SourceSpec
from torch import Tensor
from toy_modules import ToyModule, check_plan, state


def test_fused_parameter_gets_one_copy_per_source():
    rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}

    def load(parameters, name, tensor):
        parameters["qkv"].narrow(0, *rows[name]).copy_(tensor.narrow(0, rows[name][1], rows[name][1]))

    plan = check_plan({"qkv": torch.empty(8, 3)}, load, {name: torch.randn(2 * n, 3) for name, (_, n) in rows.items()})
    assert [(c.name, c.box.start, c.box.shape, c.offset, c.strides) for c in plan.copies] == [
        ("q", (4, 0), (4, 3), 0, (3, 1)),
        ("k", (2, 0), (2, 3), 12, (3, 1)),
        ("v", (2, 0), (2, 3), 18, (3, 1)),
    ]
    assert plan.through_loader == {}


def load_concatenated(parameters, name, tensor, kept):
    kept[name] = tensor
    if kept.keys() >= {"a", "b"}:
        parameters["ab"].copy_(torch.cat([kept.pop("a"), kept.pop("b")]).narrow(0, 1, 4))


def test_concatenated_sources_become_copies():
    kept: dict[str, Tensor] = {}
    plan = check_plan(
        {"ab": torch.empty(4, 3)},
        lambda p, name, t: load_concatenated(p, name, t, kept),
        {"a": torch.randn(3, 3), "c": torch.randn(3), "b": torch.randn(2, 3)},
    )
    assert [(c.name, c.box.start, c.box.shape, c.offset) for c in plan.copies] == [
        ("a", (1, 0), (2, 3), 0),
        ("b", (0, 0), (2, 3), 6),
    ]
    assert plan.through_loader == {}


def test_concatenated_sources_go_through_loader_together():
    kept: dict[str, Tensor] = {}

    def load(parameters, name, tensor):
        if name == "a":
            parameters["norm"].copy_(tensor.norm(dim=0))
        load_concatenated(parameters, name, tensor, kept)

    plan = check_plan(
        {"ab": torch.empty(4, 3), "norm": torch.empty(3)}, load, {"a": torch.randn(3, 3), "b": torch.randn(2, 3)}
    )
    assert list(plan.through_loader) == ["a", "b"]
    assert "together" in plan.through_loader["b"]


def test_one_element_is_broadcast_to_many():
    def load(parameters, name, tensor):
        parameters["p"][1] = tensor

    plan = check_plan({"p": torch.empty(2, 3)}, load, {"a": torch.tensor(5.0)})
    assert len(plan.copies) == 3


def test_empty_copies_are_ignored():
    def load(parameters, name, tensor):
        parameters["p"][:0].copy_(tensor[3:])
        if name == "a":
            parameters["p"].copy_(torch.cat([tensor[:0].clone(), tensor, tensor.t()[:, 2:2].t().contiguous()]))

    plan = check_plan({"p": torch.empty(3, 2)}, load, {"a": torch.randn(3, 2), "b": torch.randn(3, 2)})
    assert [copy.name for copy in plan.copies] == ["a"]


# Dtypes.


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("via", [None, torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float64])
def test_cast_is_a_copy_if_it_rounds_once(source, via, target):
    def load(parameters, name, tensor):
        parameters["p"].copy_(tensor if via is None else tensor.to(via))

    plan = check_plan(
        {"p": torch.empty(4096, dtype=target)}, load, {"a": torch.randn(4096, dtype=torch.float64).to(source)}
    )
    significand_bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
    exact = (
        via is None
        or via in (source, target)
        or (significand_bits[via] > significand_bits[source] and via != torch.float16)
    )
    assert plan.through_loader.keys() == (set() if exact else {"a"})
    assert all(copy.dtype == target for copy in plan.copies)


def test_cast_from_integer_goes_through_loader():
    plan = check_plan({"p": torch.empty(3)}, lambda p, name, t: p["p"].copy_(t), {"a": torch.arange(3)})
    assert plan.through_loader == {"a": "it is cast from torch.int64 to torch.float32"}
    assert plan.converted == ("a",)


def test_integers_used_in_computation_are_not_reported_as_cast():
    """As quantized values that a model unpacks: their conversion to floating point is intended."""
    plan = check_plan({"p": torch.empty(3)}, lambda p, name, t: p["p"].copy_((t & 3).float()), {"a": torch.arange(3)})
    assert list(plan.through_loader) == ["a"]
    assert plan.converted == ()


# Loads that are not copies.


@pytest.mark.parametrize(
    "compute",
    [
        lambda t: t * 2,
        lambda t: t + t.mean(),
        lambda t: t[torch.tensor([2, 0, 1, 1])],
        lambda t: (t / t.abs().max()).to(torch.float16).float(),
        lambda t: torch.cat([t[:2], torch.zeros(2)]),
        lambda t: torch.where(t > 0, t, 0.0),
        lambda t: t.clone().mul_(3),
        lambda t: [c := t.clone(), c[:2].mul_(3)][0],
    ],
)
def test_computed_values_go_through_loader(compute):
    def load(parameters, name, tensor):
        if name == "a":
            parameters["p"].narrow(0, 1, 4).copy_(compute(tensor))
            parameters["q"].copy_(tensor)
        else:
            parameters["p"].narrow(0, 0, 1).copy_(tensor)

    plan = check_plan({"p": torch.empty(5), "q": torch.empty(4)}, load, {"a": torch.randn(4), "b": torch.randn(1)})
    assert list(plan.through_loader) == ["a"]
    assert [copy.name for copy in plan.copies] == ["b"]
    assert not plan.uncovered


def test_source_whose_value_is_read_goes_through_loader():
    def load(parameters, name, tensor):
        if name == "unread":
            parameters["q"].copy_(tensor)
        elif not (tensor > 1e9).any():
            parameters["p"].fill_(tensor.item())

    plan = check_plan({"p": torch.empty(1), "q": torch.empty(1)}, load, {"a": torch.randn(1), "unread": torch.randn(1)})
    assert list(plan.through_loader) == ["a"]
    assert (plan.fills, plan.uncovered) == ((), {})


def test_copy_to_temporary_buffer_goes_through_loader():
    def load(parameters, name, tensor):
        staging = torch.empty(3)
        staging.copy_(tensor)
        parameters["p"].copy_(staging)

    plan = check_plan({"p": torch.empty(3)}, load, {"a": torch.randn(3)})
    assert list(plan.through_loader) == ["a"]


def test_shape_that_depends_on_values_is_an_error():
    model = ToyModule({"p": torch.empty(3)}, lambda p, name, t: p["p"].copy_(t[t > 0]))
    with pytest.raises(RuntimeError, match=r"failed at source 'a' \(3,\).*\['a'\] cannot be traced without data"):
        record(model, [SourceSpec("a", (3,), torch.float32)])


# Constants.


def test_padding_is_recorded_as_fills_without_overlap():
    def load(parameters, name, tensor):
        parameters["p"][: len(tensor)].copy_(tensor)
        parameters["p"][len(tensor) : -2].fill_(0)
        parameters["p"][-1:].zero_()
        parameters["p"][-2] = 7

    plan = check_plan({"p": torch.empty(6, 2)}, load, {"a": torch.randn(3, 2)})
    assert [(fill.parameter, fill.offset, fill.shape, fill.value) for fill in plan.fills] == [
        ("p", 6, (1, 2), 0.0),
        ("p", 10, (1, 2), 0.0),
        ("p", 8, (2,), 7.0),
    ]
    assert not plan.through_loader


class Threaded(ToyModule):
    def load_weights(self, weights):
        with concurrent.futures.ThreadPoolExecutor() as executor:
            futures = [executor.submit(super(Threaded, self).load_weights, [item]) for item in weights]
            for future in futures:
                future.result()


@pytest.mark.parametrize("load", [lambda p, name, t: p["p"].copy_(t), lambda p, name, t: p["p"].fill_(t.item())])
def test_copy_in_another_thread_is_an_error(load):
    model = Threaded({"p": torch.zeros(1)}, load)
    with pytest.raises(RuntimeError, match=r"failed after it had received all 1 sources: .* meta"):
        record(model, [SourceSpec("a", (1,), torch.float32)])
    assert model.get_parameter("p").item() == 0


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_recording_works_in_any_grad_mode(guard, requires_grad):
    def load(parameters, name, tensor):
        parameters["p"][1:3].copy_(tensor.t().contiguous().to("cpu"))
        parameters["p"][3:].narrow(1, 0, 1).fill_(2)
        parameters["q"].copy_(tensor.t().reshape(-1))
        parameters["r"].copy_(torch.hstack([tensor, tensor]).chunk(2)[1].to(torch.float32))

    sizes = {"p": (4, 2), "q": (4,), "r": (1, 4)}
    model = ToyModule({name: torch.zeros(shape) for name, shape in sizes.items()}, load)
    model.requires_grad_(requires_grad)
    with guard():
        plan = record(model, [SourceSpec("a", (2, 2), torch.float32)])
    assert [(copy.offset, copy.strides) for copy in plan.copies] == [
        (2, (1, 2)),
        (0, (1, 2)),
        (0, (0, 1)),
        (2, (0, 1)),
    ]
    assert [(fill.offset, fill.value) for fill in plan.fills] == [(6, 2.0)]
    assert not any(tensor.any() for tensor in state(model).values())


def test_parameters_may_be_on_the_meta_device():
    model = ToyModule({"p": torch.empty(4, 2, device="meta")}, lambda p, name, t: p["p"][1:3].copy_(t))
    plan = record(model, [SourceSpec("a", (2, 2), torch.float32)])
    assert plan.copies == (Copy("a", plan.copies[0].box, "p", 2, (2, 1), torch.float32),)
    assert plan.uncovered == {"p": 4}


def failing(parameters, name, tensor):
    parameters["p"].zero_()
    parameters[name].copy_(tensor)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            [("p", (3,)), ("unknown", (3,))],
            r"ToyModule.load_weights failed at source 'unknown' \(3,\) torch.float32: KeyError",
        ),
        ([("p", (4,))], r"failed at source 'p' \(4,\).*4"),
    ],
)
def test_failed_load_names_source_and_writes_nothing(sources, message):
    model = ToyModule({"p": torch.ones(3)}, failing)
    with pytest.raises((RuntimeError, ValueError), match=message):
        record(model, [SourceSpec(name, shape, torch.float32) for name, shape in sources])
    assert torch.equal(model.get_parameter("p"), torch.ones(3))


def test_failure_after_last_source_is_reported_as_such():
    class Strict(ToyModule):
        def load_weights(self, weights):
            super().load_weights(weights)
            raise ValueError("q is missing")

    model = Strict({"p": torch.ones(3)}, lambda p, name, t: p["p"].copy_(t))
    with pytest.raises(RuntimeError, match="failed after it had received all 1 sources: ValueError: q is missing"):
        record(model, [SourceSpec("p", (3,), torch.float32)])


def test_model_that_replaces_its_parameters_is_refused_and_restored():
    class Moving(ToyModule):
        def load_weights(self, weights):
            self.get_parameter("p").data = self.get_parameter("p").data.reshape(2, 3)
            super().load_weights(weights)

    model = Moving({"p": torch.ones(6)}, lambda p, name, t: p["p"].copy_(t))
    address = model.get_parameter("p").data_ptr()
    with pytest.raises(
        RuntimeError, match=r"replaced the memory or shape of 'p' .* in another layout than the one it loads"
    ):
        record(model, [SourceSpec("a", (2, 3), torch.float32)])
    assert (model.get_parameter("p").shape, model.get_parameter("p").data_ptr()) == ((6,), address)


def test_sources_that_are_not_iterated_are_not_copied():
    class First(ToyModule):
        def load_weights(self, weights):
            super().load_weights([next(iter(weights))])

    model = First({"p": torch.ones(3)}, lambda p, name, t: p["p"].copy_(t))
    plan = record(model, [SourceSpec(name, (3,), torch.float32) for name in "abc"])
    assert ([copy.name for copy in plan.copies], plan.through_loader) == (["a"], {})
