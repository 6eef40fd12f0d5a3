"""Recorded views: any chain of views is traced to boxes of the source."""

import random
from collections.abc import Callable, Mapping

import pytest
import torch
from tidemill_weight_update.plan.record import record
from tidemill_weight_update.tensors import SourceSpec
from torch import Tensor
from toy_modules import ToyModule, check_plan


def random_shape(rng: random.Random, num_dims: int) -> tuple[int, ...]:
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


def apply_random_views(seed: int, tensor: Tensor) -> Tensor:
    """Apply one to six random operations to `tensor`; the same seed and shape give the same operations."""
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 6)):
        tensor = rng.choice(OPERATIONS)(rng, tensor if tensor.dim() else tensor.reshape(1))
    return tensor


@pytest.mark.parametrize("block", range(20))
def test_any_chain_of_views_is_traced(block):
    for seed in range(block * 20, block * 20 + 20):
        check_chain(seed)


def check_chain(seed: int) -> None:
    rng = random.Random(seed)
    tensors = {"a": torch.randn(random_shape(rng, rng.randint(1, 4))), "b": torch.randn(5)}
    shape = apply_random_views(seed, tensors["a"]).shape
    # The destination is a view as well; the strides of its parameter may be in any order.
    room = [n + rng.randint(0, 2) for n in shape]
    order = rng.sample(range(len(room)), len(room))
    parameter = torch.empty([room[i] for i in order]).permute([order.index(i) for i in range(len(room))])
    starts = [rng.randint(0, big - n) for big, n in zip(room, shape, strict=True)]

    def load(parameters: Mapping[str, Tensor], name: str, tensor: Tensor) -> None:
        if name == "a":
            place = tuple(slice(start, start + n) for start, n in zip(starts, shape, strict=True))
            parameters["p"][place].copy_(apply_random_views(seed, tensor))

    plan = check_plan({"p": parameter}, load, tensors)
    assert {copy.name for copy in plan.copies} <= {"a"}
    assert set(plan.through_loader) <= {"a"}


def test_at_least_90_percent_of_view_chains_become_copies():
    """`check_chain` accepts a plan that loads the source through the loader; this must be rare."""
    through_loader = []
    for seed in range(400):
        shape = random_shape(random.Random(seed), random.Random(seed).randint(1, 4))
        place = torch.empty(apply_random_views(seed, torch.empty(shape)).shape)
        model = ToyModule(
            {"p": place}, lambda parameters, name, t, seed=seed: parameters["p"].copy_(apply_random_views(seed, t))
        )
        through_loader += record(model, [SourceSpec("a", shape, torch.float32)]).through_loader.values()
    assert len(through_loader) < 40, through_loader


def test_view_of_many_boxes_goes_through_loader():
    plan = check_plan({"p": torch.empty(2000)}, lambda p, name, t: p["p"].copy_(t[::2]), {"a": torch.randn(4000)})
    assert plan.through_loader == {"a": "the view consists of more than 1024 boxes"}


def test_reinterpreted_dtype_goes_through_loader():
    def load(parameters, name, tensor):
        parameters["p"].copy_(tensor.view(torch.int32).float())

    assert "bits" in check_plan({"p": torch.empty(4)}, load, {"a": torch.randn(4)}).through_loader["a"]
