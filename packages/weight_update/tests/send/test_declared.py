"""Tensors that are declared once and sent often."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from stock_engine import StockToyEngine
from tidemill_testing import run_ranks
from tidemill_weight_update import LocalShard, LoraConfig, WeightUpdater
from torch import Tensor, nn
from toy_engines import ATTN, ToyEngine, holds, same, state, tensors


def parameters(version: int) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor) for name, tensor in tensors(version).items()}


def change(held: dict[str, nn.Parameter], version: int) -> None:
    for name, tensor in tensors(version).items():
        held[name].data.copy_(tensor)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(2)


@pytest.fixture
def updater(engine):
    updater = WeightUpdater([engine], bucket_bytes=300)
    yield updater
    updater.close()


def test_declared_parameters_are_sent_as_they_are_at_each_step(engine, updater):
    held = parameters(0)
    transfer = updater.declare(iter(held.items()))
    for version in range(3):
        change(held, version)
        stats = transfer.send(version)
        assert (stats.verified, stats.num_tensors, engine.version) == (True, len(held), str(version))
        assert holds(engine, tensors(version))


def test_function_finds_parameters_that_were_replaced(engine, updater):
    held = parameters(0)
    transfer = updater.declare(held.items)
    for version in range(3):
        held.update(parameters(version))
        assert transfer.send(version).verified
        assert holds(engine, tensors(version))


def test_function_that_makes_temporaries_is_declared(engine, updater):
    made = []

    def temporaries():
        made.append(None)
        return ((name, tensor.clone()) for name, tensor in tensors(len(made)).items())

    transfer = updater.declare(temporaries)
    for version in (2, 3, 4):
        stats = transfer.send(version)
        assert (stats.verified, stats.num_bytes) == (True, sum(tensor.nbytes for tensor in tensors().values()))
        assert holds(engine, tensors(version))
    updater.update(temporaries, 5)  # the same function is not described again
    assert holds(engine, tensors(5))


def test_declared_shards_are_sent(engine, updater):
    held = parameters(0)
    shards = [
        (name, LocalShard(tensor=tensor.data, global_shape=tuple(tensor.shape), start=(0,) * tensor.dim()))
        for name, tensor in held.items()
    ]
    transfer = updater.declare(shards)
    change(held, 1)
    assert transfer.send(1).verified
    assert holds(engine, tensors(1))


def test_declarations_and_updates_are_used_in_turn(engine, updater):
    held = parameters(0)
    both = updater.declare(held.items())
    norm = updater.declare([("norm.weight", held["norm.weight"])], partial=True)
    for version in (1, 4):
        change(held, version)
        both.send(version)
        held["norm.weight"].data.fill_(version)
        norm.send(version + 1)
        assert holds(engine, tensors(version) | {"norm.weight": held["norm.weight"].detach()})
        updater.update(tensors(version + 2).items(), version + 2)
        assert holds(engine, tensors(version + 2))


def test_memory_that_moved_since_declare_is_an_error_before_any_change(engine, updater):
    held = parameters(0)
    transfer = updater.declare(held.items())
    transfer.send(0)
    held["norm.weight"].data = tensors(1)["norm.weight"]
    with pytest.raises(RuntimeError, match=r"memory of 1 declared .* moved .*: 'norm.weight'; call declare\(\) again"):
        transfer.send(1)
    assert (engine.version, engine.paused) == ("0", None)
    assert holds(engine, tensors(0))
    assert updater.update(held.items(), 1).verified  # it declares them anew
    assert updater.declare(held.items()).send(2).verified
    assert holds(engine, tensors(0) | {"norm.weight": tensors(1)["norm.weight"]})


def test_memory_that_moved_is_an_error_on_the_stock_path_too():
    engine = StockToyEngine()
    updater = WeightUpdater([engine])
    held = parameters(0)
    transfer = updater.declare(held.items())
    transfer.send(0)
    calls = list(engine.calls)
    held["norm.weight"].data = tensors(1)["norm.weight"]
    with pytest.raises(RuntimeError, match=r"memory of 1 declared .* moved"):
        transfer.send(1)
    assert (engine.calls, engine.version) == (calls, "0")
    updater.close()


def test_update_keeps_no_tensor_alive(updater):
    held = tensors(0)
    memories = [weakref.ref(tensor.untyped_storage()) for tensor in held.values()]
    updater.update(held.items(), 0)
    held.clear()
    gc.collect()
    assert all(memory() is None for memory in memories)


def renamed(items: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.new" if name == "norm.weight" else name: tensor for name, tensor in items.items()}


def cast(items: dict[str, Tensor]) -> dict[str, Tensor]:
    return items | {"norm.weight": items["norm.weight"].bfloat16()}


def reshaped(items: dict[str, Tensor]) -> dict[str, Tensor]:
    return items | {"norm.weight": items["norm.weight"].view(2, 4)}


def lacking(items: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in items.items() if name != "temperature"}


def exceeding(items: dict[str, Tensor]) -> dict[str, Tensor]:
    return items | {"more": torch.zeros(1)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (renamed, r"expected 'norm.weight' as tensor \d+, as declared, got 'norm.weight.new'"),
        (cast, "tensor 'norm.weight' differs from its declaration"),
        (reshaped, "tensor 'norm.weight' differs from its declaration"),
        (lacking, r"expected \d+ tensors, as declared, got \d+: 'temperature' is missing"),
        (exceeding, "expected no more tensors as tensor"),
    ],
)
def test_function_whose_tensors_differ_from_the_declared_ones_is_an_error(engine, updater, changed, message):
    made = tensors(0)
    transfer = updater.declare(lambda: made.items())
    transfer.send(0)
    made = changed(tensors(1))
    with pytest.raises(ValueError, match=message):
        transfer.send(1)
    assert engine.version == "0"
    made = tensors(2)
    assert transfer.readmit([engine], 2).verified
    assert holds(engine, tensors(2))


def test_missing_tensor_of_a_function_is_an_error_before_any_change(engine, updater):
    updater.update(tensors(0).items(), 0)
    before = state(engine)
    transfer = updater.declare(lambda: lacking(tensors(1)).items())
    with pytest.raises(RuntimeError, match=r"no tensor was sent for these parameters of the engine: 'temperature'"):
        transfer.send(1)
    assert same(state(engine), before)
    assert (engine.version, engine.paused) == ("0", None)


def test_engine_that_restarted_since_declare_is_updated(engine, updater):
    held = parameters(0)
    transfer = updater.declare(held.items())
    transfer.send(0)
    fresh = ToyEngine(4)  # new process: new model, new receivers, another tp_size
    engine.tp_size, engine.models, engine.receivers = 4, fresh.models, fresh.receivers
    change(held, 1)
    assert transfer.send(1).verified
    assert holds(engine, tensors(1))


def test_empty_declaration_and_closed_updater_are_refused(updater):
    with pytest.raises(ValueError, match="empty iterable"):
        updater.declare([])
    transfer = updater.declare(tensors(0).items())
    updater.close()
    with pytest.raises(RuntimeError, match="this WeightUpdater is closed"):
        transfer.send(1)
    with pytest.raises(RuntimeError, match="this WeightUpdater is closed"):
        updater.declare(tensors(0).items())


def _declare_differently() -> list[str]:
    rank = dist.get_rank()
    engines = [ToyEngine(2)] if rank == 0 else []
    updater = WeightUpdater(engines, bucket_bytes=300, timeout_s=5)
    held, messages = parameters(0), []

    def attempt(action) -> None:
        try:
            action()
        except ValueError as error:
            messages.append(str(error))
        change(held, len(messages))
        assert updater.update(held.items(), len(messages)).verified  # the ranks are in step after each error
        assert all(holds(engine, tensors(len(messages))) for engine in engines)

    attempt(lambda: updater.declare((held if rank == 0 else held | {f"{ATTN}.more": torch.zeros(2)}).items()))
    first, second = updater.declare(held.items()), updater.declare(held.items())
    attempt(lambda: (first if rank == 0 else second).send(1))
    attempt(lambda: first.send(1) if rank == 0 else updater.update(held.items(), 1))
    attempt(lambda: updater.declare(held.items()) if rank == 0 else second.readmit(engines, 1))
    adapter = LoraConfig(r=1, lora_alpha=1.0, target_modules=("q",))
    attempt(lambda: first.send(1) if rank == 0 else updater.update_adapter([], "policy", adapter, 1))
    attempt(lambda: updater.update(held.items(), 1 + rank))
    attempt(lambda: updater.update(held.items(), 1, partial=rank == 1))
    attempt(lambda: updater.declare(held.items(), partial=rank == 1))
    assert second.send(2).verified
    updater.close()
    return messages


CALLS = [
    ("send('1') of declaration 1", "send('1') of declaration 2"),
    ("send('1') of declaration 1", "update('1')"),
    ("declare()", "readmit('1') of declaration 2"),
    ("send('1') of declaration 1", "update_adapter('1')"),
    ("update('1')", "update('2')"),
    ("update('1')", "update('1', partial=True)"),
    ("declare()", "declare(partial=True)"),
]


def test_call_that_another_rank_does_not_make_is_an_error_on_all():
    for messages in run_ranks(_declare_differently, 2):
        assert len(messages) == 8
        assert "rank 1 of 2 passes 1 plain tensors that rank 0 does not have" in messages[0]
        assert f"'{ATTN}.more'" in messages[0]
        for message, pair in zip(messages[1:], CALLS, strict=True):
            assert "different calls (rank 0: {}, rank 1: {})".format(*pair) in message
