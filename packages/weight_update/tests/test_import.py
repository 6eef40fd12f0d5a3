"""Public names, and what importing the package must not load."""

import json
import subprocess
import sys

import pytest
import tidemill_weight_update
import tidemill_weight_update.sglang

PROBE = """
import importlib, json, sys
import torch
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
ALLOWED = {*sys.stdlib_module_names, "numpy", "torch", "tidemill_weight_update"}


@pytest.mark.parametrize("module", ["tidemill_weight_update", "tidemill_weight_update.sglang"])
def test_import_loads_torch_only(module):
    done = subprocess.run([sys.executable, "-c", PROBE, module], capture_output=True, check=True, text=True)
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


def test_trainer_side_does_not_load_the_engine_side_or_an_unused_transport():
    probe = "import sys, tidemill_weight_update; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, text=True)
    loaded = set(done.stdout.split())
    assert "tidemill_weight_update.updater" in loaded
    unused = ("receive", "plan.record", "plan.tracer", "remote.wire", "remote.trainer_link", "remote.engine_link")
    assert loaded & {f"tidemill_weight_update.{name}" for name in unused} == set()
