"""Tensors on a GPU that are sent again: changed in place, moved, released, temporary or wrong."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from tidemill_testing import run_ranks
from tidemill_weight_update import LocalShard, WeightUpdater
from tidemill_weight_update.send.sender import Sender
from torch import Tensor, nn
from toy_engines import ToyEngine, ToyModel, holds, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Trainer:
    """Trainer with parameters on the GPU; each is in an allocation large enough to be released alone."""

    def __init__(self, *, as_parameters: bool = True) -> None:
        self.wrap = nn.Parameter if as_parameters else Tensor.detach
        self.held: dict[str, Tensor] = {}
        self.hold(0)

    def hold(self, version: int) -> None:
        """Replace the tensors by new ones."""
        self.held = {name: self.wrap(self.placed(tensor)) for name, tensor in tensors(version).items()}

    def change(self, version: int) -> None:
        for name, tensor in tensors(version).items():
            self.held[name].data.copy_(tensor)

    def swap(self, version: int) -> None:
        """Keep the parameters, but move their values."""
        for name, tensor in tensors(version).items():
            self.held[name].data = self.placed(tensor)

    @staticmethod
    def placed(tensor: Tensor) -> Tensor:
        room = torch.empty(16 << 20, dtype=tensor.dtype, device="cuda")
        return room[: tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.fixture
def engine() -> ToyEngine:
    gc.collect()
    torch.cuda.empty_cache()  # memory cached by other tests would count as released
    return ToyEngine(2, model=lambda rank, size: ToyModel(rank, size).cuda())


@pytest.fixture
def updater(engine):
    updater = WeightUpdater([engine], timeout_s=20)
    yield updater
    updater.close()


@pytest.mark.parametrize("as_parameters", [True, False])
def test_tensors_changed_in_place_are_sent(engine, updater, as_parameters):
    trainer = Trainer(as_parameters=as_parameters)
    for version in range(5):
        trainer.change(version)
        stats = updater.update(trainer.held.items(), version)
        assert stats.verified
        assert holds(engine, tensors(version))


@pytest.mark.parametrize("move", [Trainer.hold, Trainer.swap])
@pytest.mark.parametrize("frees", [False, True])
def test_moved_tensors_are_found(engine, updater, move, frees):
    trainer = Trainer()
    for _ in range(3):
        updater.update(trainer.held.items(), "before")
    move(trainer, 7)
    if frees:
        torch.cuda.empty_cache()
    updater.update(trainer.held.items(), 7)
    assert holds(engine, tensors(7))
    for version in (8, 9, 10):
        trainer.change(version)
        updater.update(trainer.held.items(), version)
        assert holds(engine, tensors(version))


def test_temporary_tensors_are_kept_alive_while_they_are_read(engine, updater, monkeypatch):
    """They have the same addresses each time."""
    trainer = Trainer()
    made: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class Views:
        def __iter__(self):
            made.clear()
            for name, tensor in trainer.held.items():
                view = tensor.detach().view(tensor.shape)
                made.append(weakref.ref(view))
                yield name, view

    def send(self, *args, original=Sender.send):
        result = original(self, *args)  # returns after the engines have read everything
        alive.append(bool(made) and all(ref() is not None for ref in made))
        return result

    monkeypatch.setattr(Sender, "send", send)
    for version in range(4):
        trainer.change(version)
        assert updater.update(Views(), version).verified
        assert holds(engine, tensors(version))
        gc.collect()
        assert all(ref() is None for ref in made)
    assert alive == [True] * 4


def test_bad_tensors_are_refused_after_good_ones(engine, updater):
    trainer = Trainer()
    for _ in range(3):
        updater.update(trainer.held.items(), "before")
    name = "norm.weight"
    kept = trainer.held[name].data[0].clone()
    trainer.held[name].data[0] = float("nan")
    with pytest.raises(ValueError, match=name):
        updater.update(trainer.held.items(), "not finite")
    trainer.held[name].data[0] = kept
    with pytest.raises(RuntimeError, match="no tensor was sent for these parameters of the engine: 'norm'"):
        updater.update([pair for pair in trainer.held.items() if pair[0] != name], "one is missing")
    with pytest.raises(TypeError):
        updater.update({**trainer.held, "temperature": 3}.items(), "no tensor")
    assert holds(engine, tensors(0))
    assert engine.version == "before"
    trainer.change(4)
    updater.update(trainer.held.items(), 4)
    assert holds(engine, tensors(4))


def test_reused_addresses_of_released_memory_are_mapped_anew(engine, updater):
    """As in a trainer that offloads its weights between updates."""
    trainer = Trainer()
    for version in range(5):
        trainer.change(version)
        assert updater.update(trainer.held.items(), version).verified
        assert holds(engine, tensors(version))
        for tensor in trainer.held.values():
            tensor.data = tensor.data.cpu()
        torch.cuda.empty_cache()
        for tensor in trainer.held.values():
            tensor.data = Trainer.placed(tensor.data)


def test_declared_parameters_are_read_in_place_and_temporaries_through_the_arena(engine, updater):
    trainer = Trainer()
    held = updater.declare(trainer.held.items())
    made = updater.declare(lambda: ((name, tensor.detach().clone()) for name, tensor in trainer.held.items()))
    for version in range(6):
        trainer.change(version)
        assert (held if version % 3 < 2 else made).send(version).verified
        assert holds(engine, tensors(version))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_freed_memory_of_a_declaration_is_never_read(engine, dtype):
    """In place or cast into the arena; a kernel that reads it would end the CUDA context."""
    trainer = Trainer()
    updater = WeightUpdater([engine], dtype=dtype, timeout_s=20)
    transfer = updater.declare(trainer.held.items())
    for version in range(2):
        assert transfer.send(version).verified
    before = {name: tensor.detach().cpu() for name, tensor in trainer.held.items()}
    for name, tensor in trainer.held.items():
        tensor.data = before[name]
    torch.cuda.empty_cache()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="declared tensors has moved since declare"):
            transfer.send(2)
        torch.cuda.synchronize()
    assert engine.version == "1"
    for tensor in trainer.held.values():
        tensor.data = Trainer.placed(tensor.data)
    assert updater.update(trainer.held.items(), 3).verified
    updater.close()


def _half(tensor: Tensor) -> LocalShard:
    """Return this rank's half of the rows, or its copy of a scalar."""
    rank, shape = dist.get_rank(), tuple(tensor.shape)
    if not shape:
        return LocalShard(tensor=Trainer.placed(tensor), global_shape=(), start=(), replica=rank, num_replicas=2)
    half = tensor.chunk(2)[rank].contiguous()
    return LocalShard(
        tensor=Trainer.placed(half), global_shape=shape, start=(rank * len(half), *[0] * (len(shape) - 1))
    )


def _move_on_rank_1() -> tuple[str, bool]:
    rank = dist.get_rank()
    engines = [ToyEngine(2, model=lambda rank, size: ToyModel(rank, size).cuda())] if rank == 0 else []
    updater = WeightUpdater(engines, timeout_s=20)
    held = {name: _half(tensor) for name, tensor in tensors(0).items()}
    transfer = updater.declare(held.items())
    for version in range(2):
        assert transfer.send(version).verified
    for name, tensor in tensors(2).items():
        held[name].tensor.data.copy_(_half(tensor).tensor)
    if rank == 1:
        held["norm.weight"].tensor.data = Trainer.placed(held["norm.weight"].tensor.data)
    with pytest.raises(RuntimeError) as error:
        transfer.send(2)
    is_unchanged = all(holds(engine, tensors(0)) and engine.version == "1" for engine in engines)
    assert updater.update(held.items(), 2).verified
    assert all(holds(engine, tensors(2)) for engine in engines)
    updater.close()
    return str(error.value), is_unchanged


def test_memory_that_moved_on_one_of_several_ranks_is_found_before_an_engine_copies():
    """All ranks send in place, so they compare addresses while their GPUs read."""
    for message, is_unchanged in run_ranks(_move_on_rank_1, 2):
        assert "memory of 1 declared tensors has moved since declare(): 'norm.weight'" in message
        assert is_unchanged
