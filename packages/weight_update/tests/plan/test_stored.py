"""Plans on disk: used again for an equal model only, and recorded again if the file is damaged."""

import importlib
import resource
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tidemill_weight_update.plan.plan import StoredPlans
from tidemill_weight_update.plan.record import record
from tidemill_weight_update.tensors import SourceSpec
from torch import nn

CODE = '''
import torch
from torch import nn

class Halves(nn.Module):
    """Loads the halves of `weight`, a sum into `summed`, and a constant into `padded`."""

    def __init__(self, size=4):
        super().__init__()
        self.size, self.num_loads = size, 0
        self.weight = nn.Parameter(torch.zeros(2 * size, 3), requires_grad=False)
        self.summed = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.padded = nn.Parameter(torch.zeros(5), requires_grad=False)

    def load_weights(self, weights):
        self.num_loads += 1
        for name, tensor in weights:
            if name == "unused":
                continue
            if name == "summed":
                self.summed.data.copy_(tensor + 1)
            else:
                self.weight.data.narrow(0, self.size * int(name), self.size).copy_(tensor)
        self.padded.data.fill_(2.0)
'''
SOURCES = [
    SourceSpec("0", (4, 3), torch.float32),
    SourceSpec("1", (4, 3), torch.bfloat16),
    SourceSpec("summed", (3,), torch.float32),
    SourceSpec("unused", (1,), torch.float32),
]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """`make(**arguments)`: a model whose class is in a file, as an engine's are; plans are stored in `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "halves.py").write_text(CODE)
    importlib.invalidate_caches()
    yield lambda **arguments: importlib.import_module("halves").Halves(**arguments)
    sys.modules.pop("halves", None)


def cover(model: nn.Module, sources=SOURCES, identity=("1.0", 0)):
    """Return the plan, and whether it was recorded."""
    plan = StoredPlans(model, identity).get(sources, lambda: record(model, sources))
    return plan, bool(model.num_loads)


def test_plan_is_recorded_once_for_equal_models(make):
    first, recorded = cover(make())
    assert recorded
    assert (len(first.copies), len(first.fills), list(first.through_loader)) == (2, 1, ["summed"])
    second, recorded = cover(make())
    assert not recorded
    assert second == first


@pytest.mark.parametrize(
    "change",
    [
        "identity",
        "dtype",
        "shape",
        "order",
        "parameter",
        "setting",
        "setting in an object",
        "code",
        "type of an attribute",
    ],
)
def test_plan_is_recorded_again_after_a_change(make, tmp_path, change):
    before = make()
    before.config = SimpleNamespace(swaps=False)
    cover(before)
    model, sources, identity = make(), list(SOURCES), ("1.0", 0)
    model.config = SimpleNamespace(swaps=change == "setting in an object")
    if change == "identity":
        identity = ("1.0", 1)
    elif change == "dtype":
        sources[0] = replace(sources[0], dtype=torch.float16)
    elif change == "shape":
        sources[3] = replace(sources[3], shape=(2,))
    elif change == "order":
        sources.reverse()
    elif change == "parameter":
        model.padded = nn.Parameter(torch.zeros(6), requires_grad=False)
    elif change == "setting":
        model.scale = 2
    elif change == "type of an attribute":
        model.helper = object()
    elif change == "code":
        (tmp_path / "halves.py").write_text(CODE + "# another version\n")
    _, recorded = cover(model, sources, identity)
    assert recorded


@pytest.mark.parametrize("damage", [lambda data: data[:-10], lambda data: data.replace(b"sum", b"pad"), lambda _: b""])
def test_damaged_file_is_replaced(make, tmp_path, caplog, damage):
    plan, _ = cover(make())
    [path] = (tmp_path / "tidemill" / "plans").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again, recorded = cover(make())
    assert recorded
    assert again == plan
    assert f"the stored plan {path} is damaged; it is recorded again" in caplog.text
    assert cover(make()) == (plan, False)


def test_folder_that_cannot_be_written_is_logged(make, tmp_path, caplog):
    (tmp_path / "tidemill").write_text("a file")
    for _ in range(2):
        assert cover(make())[1]
    assert "cannot store the plan" in caplog.text


def test_full_disk_is_logged_and_leaves_no_file(make, tmp_path, caplog):
    model = make()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # longer files cannot be written
    try:
        assert cover(model)[1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot store the plan" in caplog.text
    assert list((tmp_path / "tidemill" / "plans").iterdir()) == []


def test_plan_of_code_that_cannot_be_read_is_not_stored(make, tmp_path, caplog):
    model = make()
    (tmp_path / "halves.py").unlink()
    for _ in range(2):
        model.num_loads = 0
        assert cover(model)[1]
    assert "the code of the model cannot be read" in caplog.text


def test_folder_is_in_the_users_cache(make, tmp_path):
    cover(make())
    [path] = (tmp_path / "tidemill" / "plans").iterdir()
    assert path.name.startswith("Halves-")
