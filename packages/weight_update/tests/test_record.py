"""Recording, on small modules: a replay of the plan gives what the module's own `load_weights` gives."""

import concurrent.futures
import random
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from tidemill_weight_update.plan import Copy, CopyPlan, SourceSpec
from tidemill_weight_update.record import finish_load, record, write_fills
from torch import Tensor, nn

Load = Callable[[Mapping[str, Tensor], str, Tensor], None]


class Toy(nn.Module):
    """Loads each source by a function of its parameters' data, the source's name and its tensor."""

    def __init__(self, parameters: Mapping[str, Tensor], load: Load) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            data = torch.empty_like(tensor).copy_(tensor)  # with the strides that `tensor` has
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


def check(parameters: Mapping[str, Tensor], load: Load, tensors: Mapping[str, Tensor]) -> CopyPlan:
    """Records, and holds a replay against the module's own loading, from a start where what is not written shows."""
    blank = {name: torch.full_like(parameter, float("nan")) for name, parameter in parameters.items()}
    reference, model = Toy(blank, load), Toy(blank, load)
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
    copied = {copy.name for copy in plan.copies}
    assert sorted([*copied, *plan.through_loader, *plan.unused]) == sorted(tensors)
    return plan


# Views.


def shape_of(rng: random.Random, num_dims: int) -> tuple[int, ...]:
    return tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(num_dims))


def narrowed(rng: random.Random, t: Tensor) -> Tensor:
    dim = rng.randrange(t.dim())
    start = rng.randrange(t.shape[dim])
    return t.narrow(dim, start, rng.randint(1, t.shape[dim] - start))


def flattened(rng: random.Random, t: Tensor) -> Tensor:
    dim = rng.randrange(t.dim())
    return t.flatten(dim, min(dim + 1, t.dim() - 1))


def unflattened(rng: random.Random, t: Tensor) -> Tensor:
    dim = rng.randrange(t.dim())
    inner = rng.choice([n for n in range(1, t.shape[dim] + 1) if t.shape[dim] % n == 0])
    return t.unflatten(dim, (t.shape[dim] // inner, inner))


def stepped(rng: random.Random, t: Tensor) -> Tensor:
    dim = rng.randrange(t.dim())
    return t[(slice(None),) * dim + (slice(None, None, 2),)]


OPERATIONS: list[Callable[[random.Random, Tensor], Tensor]] = [
    narrowed,
    narrowed,
    flattened,
    unflattened,
    stepped,
    lambda rng, t: t.permute(*rng.sample(range(t.dim()), t.dim())),
    lambda rng, t: t.transpose(0, t.dim() - 1),
    lambda rng, t: t.select(0, rng.randrange(t.shape[0])) if t.dim() > 1 else t,
    lambda rng, t: t.unsqueeze(rng.randrange(t.dim() + 1)),
    lambda rng, t: t.squeeze(),
    lambda rng, t: t.clone(),
    lambda rng, t: t.contiguous(),
    lambda rng, t: rng.choice(t.chunk(2, rng.randrange(t.dim()))),
    lambda rng, t: rng.choice(t.split(2, rng.randrange(t.dim()))),
    lambda rng, t: t.detach().to("cpu"),
    lambda rng, t: torch.cat([t, t], rng.randrange(t.dim())),
    lambda rng, t: torch.stack([t, t], rng.randrange(t.dim() + 1)),
    lambda rng, t: t.reshape(-1),
    lambda rng, t: t.expand(3, *t.shape) if t.numel() < 50 else t,
    lambda rng, t: t.unbind(0)[-1] if t.dim() > 1 else t,
]


def applied(seed: int, tensor: Tensor) -> Tensor:
    """`tensor` after one to six operations; the same ones for the same seed and shape."""
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 6)):
        tensor = rng.choice(OPERATIONS)(rng, tensor if tensor.dim() else tensor.reshape(1))
    return tensor


@pytest.mark.parametrize("block", range(20))
def test_any_chain_of_views_is_followed(block):
    for seed in range(block * 20, block * 20 + 20):
        check_chain(seed)


def check_chain(seed: int) -> None:
    rng = random.Random(seed)
    tensors = {"a": torch.randn(shape_of(rng, rng.randint(1, 4))), "b": torch.randn(5)}
    shape = applied(seed, tensors["a"]).shape
    # The place in the parameter is a view as well, in a parameter whose dims may lie in any order in memory.
    room = [n + rng.randint(0, 2) for n in shape]
    order = rng.sample(range(len(room)), len(room))
    parameter = torch.empty([room[i] for i in order]).permute([order.index(i) for i in range(len(room))])
    starts = [rng.randint(0, big - n) for big, n in zip(room, shape, strict=True)]

    def load(parameters: Mapping[str, Tensor], name: str, tensor: Tensor) -> None:
        if name == "a":
            place = tuple(slice(start, start + n) for start, n in zip(starts, shape, strict=True))
            parameters["p"][place].copy_(applied(seed, tensor))

    plan = check({"p": parameter}, load, tensors)
    assert plan.unused == ("b",)
    assert set(plan.through_loader) <= {"a"}


def test_nearly_all_views_are_copies():
    """What the test before this one accepts, it may not accept often."""
    left = []
    for seed in range(400):
        shape = shape_of(random.Random(seed), random.Random(seed).randint(1, 4))
        place = torch.empty(applied(seed, torch.empty(shape)).shape)
        model = Toy({"p": place}, lambda parameters, name, t, seed=seed: parameters["p"].copy_(applied(seed, t)))
        left += record(model, [SourceSpec("a", shape, torch.float32)]).through_loader.values()
    assert len(left) < 40, left


def test_a_view_of_many_pieces_is_left_to_the_loader():
    plan = check({"p": torch.empty(2000)}, lambda p, name, t: p["p"].copy_(t[::2]), {"a": torch.randn(4000)})
    assert plan.through_loader == {"a": "the view falls into more than 1024 boxes"}


def test_bits_read_as_another_dtype_are_left_to_the_loader():
    def load(parameters, name, tensor):
        parameters["p"].copy_(tensor.view(torch.int32).float())

    assert "bits" in check({"p": torch.empty(4)}, load, {"a": torch.randn(4)}).through_loader["a"]


def test_a_fused_parameter_is_copied_part_by_part():
    rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}

    def load(parameters, name, tensor):
        parameters["qkv"].narrow(0, *rows[name]).copy_(tensor.narrow(0, rows[name][1], rows[name][1]))

    plan = check({"qkv": torch.empty(8, 3)}, load, {name: torch.randn(2 * n, 3) for name, (_, n) in rows.items()})
    assert [(c.name, c.box.start, c.box.shape, c.offset, c.strides) for c in plan.copies] == [
        ("q", (4, 0), (4, 3), 0, (3, 1)),
        ("k", (2, 0), (2, 3), 12, (3, 1)),
        ("v", (2, 0), (2, 3), 18, (3, 1)),
    ]
    assert (plan.through_loader, plan.groups, plan.overwritten) == ({}, (), {})


def joined_load(parameters, name, tensor, kept):
    kept[name] = tensor
    if kept.keys() >= {"a", "b"}:
        parameters["ab"].copy_(torch.cat([kept.pop("a"), kept.pop("b")]).narrow(0, 1, 4))


def test_joined_sources_are_copies_of_a_group():
    kept: dict[str, Tensor] = {}
    plan = check(
        {"ab": torch.empty(4, 3)},
        lambda p, name, t: joined_load(p, name, t, kept),
        {"a": torch.randn(3, 3), "c": torch.randn(3), "b": torch.randn(2, 3)},
    )
    assert [(c.name, c.box.start, c.box.shape, c.offset) for c in plan.copies] == [
        ("a", (1, 0), (2, 3), 0),
        ("b", (0, 0), (2, 3), 6),
    ]
    assert (plan.groups, plan.unused) == ((("a", "b"),), ("c",))


def test_a_group_is_left_to_the_loader_as_a_whole():
    kept: dict[str, Tensor] = {}

    def load(parameters, name, tensor):
        if name == "a":
            parameters["norm"].copy_(tensor.norm(dim=0))
        joined_load(parameters, name, tensor, kept)

    plan = check(
        {"ab": torch.empty(4, 3), "norm": torch.empty(3)}, load, {"a": torch.randn(3, 3), "b": torch.randn(2, 3)}
    )
    assert list(plan.through_loader) == ["a", "b"]
    assert "together" in plan.through_loader["b"]


def test_one_element_may_fill_many():
    def load(parameters, name, tensor):
        parameters["p"][1] = tensor

    plan = check({"p": torch.empty(2, 3)}, load, {"a": torch.tensor(5.0)})
    assert len(plan.copies) == 3


def test_empty_parts_are_harmless():
    def load(parameters, name, tensor):
        parameters["p"][:0].copy_(tensor[3:])
        if name == "a":
            parameters["p"].copy_(torch.cat([tensor[:0].clone(), tensor, tensor.t()[:, 2:2].t().contiguous()]))

    plan = check({"p": torch.empty(3, 2)}, load, {"a": torch.randn(3, 2), "b": torch.randn(3, 2)})
    assert (len(plan.copies), plan.unused) == (1, ("b",))


# Dtypes.


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("via", [None, torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float64])
def test_a_cast_is_a_copy_if_it_rounds_once(source, via, target):
    def load(parameters, name, tensor):
        parameters["p"].copy_(tensor if via is None else tensor.to(via))

    plan = check({"p": torch.empty(4096, dtype=target)}, load, {"a": torch.randn(4096, dtype=torch.float64).to(source)})
    holds = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}  # bits of the significand
    exact = via is None or via in (source, target) or (holds[via] > holds[source] and via != torch.float16)
    assert plan.through_loader.keys() == (set() if exact else {"a"})
    assert all(copy.dtype == target for copy in plan.copies)


def test_a_cast_from_an_integer_is_left_to_the_loader():
    plan = check({"p": torch.empty(3)}, lambda p, name, t: p["p"].copy_(t), {"a": torch.arange(3)})
    assert plan.through_loader == {"a": "it is cast from torch.int64 to torch.float32"}


# What is no copy.


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
    ],
)
def test_what_is_computed_is_left_to_the_loader(compute):
    def load(parameters, name, tensor):
        if name == "a":
            parameters["p"].narrow(0, 1, 4).copy_(compute(tensor))
            parameters["q"].copy_(tensor)
        else:
            parameters["p"].narrow(0, 0, 1).copy_(tensor)

    plan = check({"p": torch.empty(5), "q": torch.empty(4)}, load, {"a": torch.randn(4), "b": torch.randn(1)})
    assert list(plan.through_loader) == ["a"]
    assert [copy.name for copy in plan.copies] == ["b"]
    assert not plan.uncovered


def test_a_value_that_is_read_is_left_to_the_loader():
    def load(parameters, name, tensor):
        if name == "unread":
            parameters["q"].copy_(tensor)
        elif not (tensor > 1e9).any():
            parameters["p"].fill_(tensor.item())

    plan = check({"p": torch.empty(1), "q": torch.empty(1)}, load, {"a": torch.randn(1), "unread": torch.randn(1)})
    assert list(plan.through_loader) == ["a"]
    assert (plan.fills, plan.uncovered) == ((), {})


def test_a_copy_to_something_that_is_no_parameter_is_left_to_the_loader():
    def load(parameters, name, tensor):
        staging = torch.empty(3)
        staging.copy_(tensor)
        parameters["p"].copy_(staging)

    plan = check({"p": torch.empty(3)}, load, {"a": torch.randn(3)})
    assert list(plan.through_loader) == ["a"]


def test_what_needs_values_for_its_shape_is_an_error():
    model = Toy({"p": torch.empty(3)}, lambda p, name, t: p["p"].copy_(t[t > 0]))
    with pytest.raises(RuntimeError, match=r"failed at source 'a' \(3,\).*\['a'\] cannot be followed without data"):
        record(model, [SourceSpec("a", (3,), torch.float32)])


# Constants.


def test_padding_is_written_once():
    def load(parameters, name, tensor):
        parameters["p"][: len(tensor)].copy_(tensor)
        parameters["p"][len(tensor) :].fill_(0)
        parameters["p"][-1:].zero_()
        parameters["p"][-2] = 7

    plan = check({"p": torch.empty(6, 2)}, load, {"a": torch.randn(3, 2)})
    assert [(fill.parameter, fill.offset, fill.shape, fill.value) for fill in plan.fills] == [
        ("p", 6, (3, 2), 0.0),
        ("p", 10, (1, 2), 0.0),
        ("p", 8, (2,), 7.0),
    ]
    assert not plan.overwritten


# The order of writes.


class Framed(Toy):
    """Does something before it takes the first source and after the last."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights([("before", torch.empty(4, 5))])
        super().load_weights(weights)
        super().load_weights([("after", torch.empty(4, 5))])


def program(seed: int) -> tuple[dict[str, Tensor], Load, dict[str, Tensor]]:
    """A loading whose sources, constants and changes in place hit the same elements, in any order."""
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
def test_a_replay_keeps_what_was_written_last(block):
    for seed in range(block * 30, block * 30 + 30):
        parameters, load, tensors = program(seed)
        blank = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        reference, model = Framed(blank, load), Framed(blank, load)
        reference.load_weights(iter(tensors.items()))
        plan = record(model, specs(tensors))
        assert same(state(model), blank), seed
        replay(model, plan, tensors)
        assert same(state(model), state(reference)), seed


def test_programs_are_of_all_kinds():
    """The test before this one looks at plans with copies, fills, hidden writes and names left to the loader."""
    plans = [record(Framed(parameters, load), specs(tensors)) for parameters, load, tensors in map(program, range(600))]
    assert sum(bool(plan.copies) and bool(plan.fills) for plan in plans) > 20
    assert sum(bool(plan.overwritten) and not plan.through_loader for plan in plans) > 20
    assert sum(bool(plan.copies) and bool(plan.through_loader) for plan in plans) > 50


def overlapping(parameters, name, tensor):
    start, size = {"whole": (0, 6), "first": (0, 3), "last": (3, 3), "middle": (2, 2)}[name]
    parameters["p"].narrow(0, start, size).copy_(tensor)


def test_what_others_overwrite_completely_is_not_copied():
    sizes = {"whole": 6, "first": 3, "last": 3}
    plan = check({"p": torch.empty(6)}, overlapping, {name: torch.randn(n) for name, n in sizes.items()})
    assert [copy.name for copy in plan.copies] == ["first", "last"]
    assert (plan.overwritten, plan.unused, plan.through_loader) == ({"p": 6}, ("whole",), {})


def test_what_others_overwrite_in_part_is_left_to_the_loader():
    sizes = {"first": 3, "last": 3, "middle": 2}
    plan = check({"p": torch.empty(6)}, overlapping, {name: torch.randn(n) for name, n in sizes.items()})
    assert list(plan.through_loader) == ["first", "middle"]
    assert [copy.name for copy in plan.copies] == ["last"]  # "middle" is loaded after the copies, as before
    assert plan.overwritten == {"p": 2}


def test_what_loading_does_at_its_end_is_left_to_the_loader():
    def load(parameters, name, tensor):
        if name == "after":
            parameters["p"].add_(1)
        elif name != "before":
            parameters[name].copy_(tensor)

    tensors = {"p": torch.randn(3), "q": torch.randn(3)}
    reference, model = (Framed({name: torch.zeros(3) for name in tensors}, load) for _ in range(2))
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
    plan = check({"p": torch.empty(6000, 2)}, load, tensors)
    assert (len(plan.copies), plan.overwritten, plan.uncovered) == (2, {}, {})
    del tensors["odd"]
    assert check({"p": torch.empty(6000, 2)}, load, tensors).uncovered == {"p": 6000}


def test_parameters_with_gaps_are_looked_at_element_by_element():
    def load(parameters, name, tensor):
        parameters["p"].narrow(1, int(name), 2).copy_(tensor)

    blank = torch.zeros(4, 8)[:, :5]
    model = Toy({}, load)
    model.register_parameter("p", nn.Parameter(blank, requires_grad=False))
    plan = record(model, [SourceSpec(name, (4, 2), torch.float32) for name in ("0", "3")])
    assert (plan.uncovered, plan.overwritten, len(plan.copies)) == ({"p": 4}, {}, 2)
    plan = record(model, [SourceSpec(name, (4, 2), torch.float32) for name in ("0", "1", "3")])
    assert (plan.uncovered, plan.overwritten) == ({}, {"p": 4})


def test_parameters_that_share_memory_are_one():
    def load(parameters, name, tensor):
        parameters["p"].copy_(tensor)

    model = Toy({"p": torch.zeros(3)}, load)
    model.register_parameter("again", nn.Parameter(model.get_parameter("p").data, requires_grad=False))
    model.register_parameter("tied", model.get_parameter("p"))
    plan = record(model, [SourceSpec("a", (3,), torch.float32)])
    assert ([copy.parameter for copy in plan.copies], plan.uncovered) == (["p"], {})


def test_parameters_may_lie_in_one_block():
    block = torch.zeros(10)
    model = Toy({}, lambda p, name, t: p[name].copy_(t))
    for name, start, size in (("p", 0, 4), ("q", 4, 6)):
        model.register_parameter(name, nn.Parameter(block[start : start + size], requires_grad=False))
    plan = record(model, [SourceSpec("q", (6,), torch.float32)])
    assert [(copy.parameter, copy.offset) for copy in plan.copies] == [("q", 0)]
    assert plan.uncovered == {"p": 4}


# Threads, errors, surroundings.


class Threaded(Toy):
    def load_weights(self, weights):
        with concurrent.futures.ThreadPoolExecutor() as executor:
            futures = [executor.submit(super(Threaded, self).load_weights, [item]) for item in weights]
            for future in futures:
                future.result()


def test_copies_in_other_threads_are_recorded():
    tensors = {f"s{i}": torch.randn(8, 3) for i in range(50)}
    place = torch.empty(50, 3, 4)

    def load(parameters, name, tensor):
        parameters["p"][int(name[1:])].copy_(tensor.narrow(0, 2, 4).t())

    reference, model = Threaded({"p": place}, load), Threaded({"p": place}, load)
    reference.load_weights(iter(tensors.items()))
    before = state(model)
    plan = record(model, specs(tensors))
    assert same(state(model), before)
    assert len(plan.copies) == 50
    assert (plan.through_loader, plan.uncovered, plan.overwritten) == ({}, {}, {})
    replay(model, plan, tensors)
    assert same(state(model), state(reference))


def test_a_value_that_another_thread_reads_is_an_error():
    model = Threaded({"p": torch.zeros(1)}, lambda p, name, t: p["p"].fill_(t.item()))
    with pytest.raises(RuntimeError, match=r"the value of \['a'\] is read in another thread"):
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
    model = Toy({name: torch.zeros(shape) for name, shape in sizes.items()}, load)
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
    model = Toy({"p": torch.empty(4, 2, device="meta")}, lambda p, name, t: p["p"][1:3].copy_(t))
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
            r"Toy.load_weights failed at source 'unknown' \(3,\) torch.float32: KeyError",
        ),
        ([("p", (4,))], r"failed at source 'p' \(4,\).*4"),
        ([("p", (3,)), ("p", (3,))], r"each source may come once, got twice: \['p'\]"),
    ],
)
def test_a_load_that_fails_names_the_source_and_writes_nothing(sources, message):
    model = Toy({"p": torch.ones(3)}, failing)
    with pytest.raises((RuntimeError, ValueError), match=message):
        record(model, [SourceSpec(name, shape, torch.float32) for name, shape in sources])
    assert torch.equal(model.get_parameter("p"), torch.ones(3))


def test_a_failure_after_the_last_source_says_so():
    class Strict(Toy):
        def load_weights(self, weights):
            super().load_weights(weights)
            raise ValueError("q is missing")

    model = Strict({"p": torch.ones(3)}, lambda p, name, t: p["p"].copy_(t))
    with pytest.raises(RuntimeError, match="failed after it had been given all 1 sources: ValueError: q is missing"):
        record(model, [SourceSpec("p", (3,), torch.float32)])


def test_a_model_that_moves_its_weights_is_refused_and_put_back():
    class Moving(Toy):
        def load_weights(self, weights):
            self.get_parameter("p").data = self.get_parameter("p").data.reshape(2, 3)
            super().load_weights(weights)

    model = Moving({"p": torch.ones(6)}, lambda p, name, t: p["p"].copy_(t))
    address = model.get_parameter("p").data_ptr()
    with pytest.raises(RuntimeError, match=r"gave 'p' .* in a layout that is not the one it loads"):
        record(model, [SourceSpec("a", (2, 3), torch.float32)])
    assert (model.get_parameter("p").shape, model.get_parameter("p").data_ptr()) == ((6,), address)


def test_sources_that_are_not_taken_are_unused():
    class First(Toy):
        def load_weights(self, weights):
            super().load_weights([next(iter(weights))])

    model = First({"p": torch.ones(3)}, lambda p, name, t: p["p"].copy_(t))
    plan = record(model, [SourceSpec(name, (3,), torch.float32) for name in "abc"])
    assert ([copy.name for copy in plan.copies], plan.unused) == (["a"], ("b", "c"))


def test_a_model_that_derives_tensors_does_so_again():
    class Deriving(Toy):
        def post_load_weights(self):
            self.doubled = self.get_parameter("p") * 2

    model = Deriving({"p": torch.ones(3)}, lambda p, name, t: p["p"].copy_(t))
    finish_load(model)
    assert torch.equal(model.doubled, torch.full((3,), 2.0))
    finish_load(Toy({}, model.load))
