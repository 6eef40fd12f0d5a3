"""The fast path updates an engine that is not SGLang."""

from collections.abc import Iterator

import pytest
import torch
from mlp_engine import HIDDEN, INNER, MlpEngine
from tidemill_weight_update import WeightUpdater
from torch import Tensor, nn
from torch.nn import functional

X = torch.linspace(-1, 1, 3 * HIDDEN).view(3, HIDDEN)


class Mlp(nn.Module):
    """The trainer's model."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture
def engine(tmp_path) -> Iterator[MlpEngine]:
    engine = MlpEngine(2, tmp_path)
    yield engine
    engine.close()


def test_engine_of_another_family_answers_as_the_trainer(engine):
    updater = WeightUpdater([engine])
    for version in (1, 2):
        model = Mlp()
        stats = updater.update(model.state_dict().items(), weight_version=version)
        assert (stats.verified, stats.num_tensors, stats.through_loader) == (True, 3, {})
        assert engine.get_weight_version() == str(version)
        torch.testing.assert_close(engine.answer(X), model(X).detach())
    assert not {name for name in engine.modules() if "sglang" in name}
    updater.close()
