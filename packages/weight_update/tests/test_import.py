"""What the package loads and exports."""

import json
import subprocess
import sys

import tidemill_weight_update
import tidemill_weight_update.sglang

PROBE = """
import json, sys
import torch
before = set(sys.modules)
import {module}
new = sorted(set(sys.modules) - before)
own = [m for m in new if m.startswith("tidemill")]
known = {{*sys.stdlib_module_names, "torch", "tidemill_weight_update"}}
print(json.dumps([own, [m for m in new if m.split(".")[0] not in known]]))
"""


def loaded_by(module: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)], capture_output=True, check=True, text=True
    )
    return json.loads(done.stdout)


def test_import_loads_torch_and_a_handful_of_modules():
    own, other = loaded_by("tidemill_weight_update")
    assert own == ["tidemill_weight_update"] + [
        f"tidemill_weight_update.{name}"
        for name in ("arena", "bucket", "client", "gather", "handle", "ranks", "stats", "updater")
    ]
    assert other == []


def test_the_sglang_clients_do_not_load_sglang():
    own, other = loaded_by("tidemill_weight_update.sglang")
    assert {"tidemill_weight_update.sglang.http", "tidemill_weight_update.sglang.local"} <= set(own)
    assert other == []


def test_exports_are_pinned():
    assert tidemill_weight_update.__all__ == ["BucketHandle", "EngineClient", "UpdateStats", "WeightUpdater"]
    assert tidemill_weight_update.sglang.__all__ == ["HttpEngine", "LocalEngine"]
    assert all(hasattr(tidemill_weight_update, name) for name in tidemill_weight_update.__all__)
