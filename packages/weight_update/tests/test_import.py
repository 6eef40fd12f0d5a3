"""Public names, what importing the package must not load, and how many modules there are to read."""

import json
import subprocess
import sys
import threading
from graphlib import TopologicalSorter

import grimp
import tidemill_weight_update
import tidemill_weight_update.sglang
from tidemill_weight_update import WeightUpdater
from toy_engines import ToyEngine, tensors

PROBE = """
import json, sys
import torch
before = set(sys.modules)
import tidemill_weight_update.sglang
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
ALLOWED = {*sys.stdlib_module_names, "numpy", "torch", "tidemill_weight_update"}


def test_import_loads_torch_only():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=True, text=True)
    loaded = set(json.loads(done.stdout))
    assert "tidemill_weight_update" in loaded
    # Not sglang, ray, triton, transformers, megatron, nor another package of this repository.
    assert loaded - ALLOWED == set()


def test_exports_are_pinned():
    assert tidemill_weight_update.__all__ == [
        *("AdapterClient", "BucketHandle", "EngineClient", "GroupLink", "HoldingClient", "LocalShard", "LoraConfig"),
        *("PauseMode", "Request", "Transfer", "UpdateStats", "WeightUpdater", "merge_lora"),
    ]
    assert tidemill_weight_update.sglang.__all__ == ["HttpEngine", "LocalEngine", "sglang_launch_args"]
    assert all(hasattr(tidemill_weight_update, name) for name in tidemill_weight_update.__all__)


def test_trainer_side_loads_few_modules_and_neither_the_engine_side_nor_a_transport():
    probe = "import sys, tidemill_weight_update; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, text=True)
    own = {name for name in done.stdout.split() if name.startswith("tidemill_weight_update")}
    assert "tidemill_weight_update.updater" in own
    assert len(own) <= 25
    assert not [name for name in own if name.split(".")[1:2] in (["receive"], ["plan"], ["remote"])]


def test_package_is_small_and_has_no_import_cycles():
    graph = grimp.build_graph("tidemill_weight_update")
    assert len(graph.modules) <= 50
    order = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    assert set(order.static_order()) == graph.modules  # raises CycleError if there is a cycle


def test_sending_a_tensor_enters_few_modules():
    """Both sides together, without the client of the engine and the function that SGLang calls."""
    entered = set()

    def note(frame, event, _) -> None:
        if event == "call":
            entered.add(frame.f_globals.get("__name__", ""))

    updater = WeightUpdater([ToyEngine(2)])
    transfer = updater.declare(list(tensors().items()))
    transfer.send(1)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        transfer.send(2)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    updater.close()
    own = {name for name in entered if name.startswith("tidemill_weight_update.")}
    assert {"tidemill_weight_update.updater", "tidemill_weight_update.receive.session"} <= own
    assert len(own) <= 17, sorted(own)
