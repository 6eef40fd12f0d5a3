"""Host memory that updates take on the trainer's side, and its release."""

import weakref
from functools import partial

import pytest
import torch
from shared_memory import arena_mappings
from tidemill_weight_update import WeightUpdater
from torch import Tensor, nn
from toy_engines import MODES, ToyEngine, as_mode, tensors


def mapped_bytes() -> int:
    """Bytes of shared host memory that this process maps for tensors; each arena counts once."""
    return sum(arena_mappings().values())


class Wide(nn.Module):
    """Model with one large parameter of 600 bytes per row, sharded by rows."""

    def __init__(self, rank: int, size: int, rows: int) -> None:
        super().__init__()
        self.rows = rows // size
        self.rank = rank
        self.weight = nn.Parameter(torch.zeros(self.rows, 3, 100, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor.narrow(0, self.rank * self.rows, self.rows))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "bucket_bytes"), [(256, 1 << 15), (256, 1000), (32, 100)])
def test_tensor_larger_than_a_bucket_takes_two_buckets_of_memory(rows, bucket_bytes, mode):
    engine = ToyEngine(2, model=partial(Wide, rows=rows))
    checkpoint = {"weight": torch.randn(rows, 3, 100)}
    updater = WeightUpdater([engine], bucket_bytes=bucket_bytes, dtype=torch.bfloat16)
    before = mapped_bytes()
    stats = updater.update(as_mode(checkpoint, mode), 1)
    assert 0 < mapped_bytes() - before <= 2 * bucket_bytes + 2 * 4096
    assert stats.num_buckets >= rows * 600 // bucket_bytes
    assert torch.equal(torch.cat([model.weight for model in engine.models]), checkpoint["weight"].bfloat16())
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_growing_arenas_release_the_smaller_ones(mode):
    class Steps(nn.Module):
        def __init__(self, rank: int, size: int) -> None:
            super().__init__()
            rows = [nn.Parameter(torch.zeros(i * 1024), requires_grad=False) for i in range(1, 17)]
            self.rows = nn.ParameterList(rows)

        def load_weights(self, weights) -> None:
            for name, tensor in weights:
                self.rows[int(name)].data.copy_(tensor)

    engine = ToyEngine(1, model=Steps)
    updater = WeightUpdater([engine], bucket_bytes=1 << 16)
    items = [(str(i), torch.full(((i + 1) * 1024,), float(i))) for i in range(16)]
    before = mapped_bytes()
    for version, last in enumerate((4, 4, 8, 16, 16)):
        checkpoint = dict(items[:last])
        stats = updater.update(as_mode(checkpoint, mode), version, partial=True)
        assert mapped_bytes() - before <= 2 * (1 << 16) + 2 * 4096
    assert stats.num_buckets > 10
    assert all(torch.equal(row, tensor) for row, (_, tensor) in zip(engine.models[0].rows, items, strict=True))
    updater.close()


@pytest.mark.parametrize("mode", MODES)
def test_repeated_updates_of_one_bucket_reuse_the_arena(mode):
    engine = ToyEngine(1)
    updater = WeightUpdater([engine])
    used: list[int] = []
    mapped: list[set[object]] = []
    for version in range(4):
        assert updater.update(as_mode(tensors(version), mode), version).num_buckets == 1
        used.append(mapped_bytes())
        mapped.append(set(engine.receivers[0]._memories._open))
    assert used == used[:1] * 4
    assert mapped == mapped[:1] * 4
    updater.close()


def test_tensors_of_a_function_are_released_as_they_are_sent():
    """Of 100 tensors of 4 kB in buckets of 16 kB, at most those of two buckets and a few more are alive."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    class Rows(nn.Module):
        def __init__(self, rank: int, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(100, 1000), requires_grad=False)

        def load_weights(self, weights) -> None:
            for name, tensor in weights:
                self.weight.data[int(name)].copy_(tensor)

    def items():
        nonlocal most
        for i in range(100):
            tensor = torch.full((1000,), float(i))
            alive.add(tensor)
            most = max(most, len(alive))
            yield str(i), tensor
            del tensor

    engine = ToyEngine(1, model=Rows)
    updater = WeightUpdater([engine], bucket_bytes=16_384)
    for version in range(2):
        assert updater.update(items, version).num_buckets == 25
        assert torch.equal(engine.models[0].weight[:, 0], torch.arange(100.0))
        assert len(alive) == 0
    assert most <= 10
    updater.close()
