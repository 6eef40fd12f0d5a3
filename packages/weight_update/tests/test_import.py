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
known |= {{"numpy"}} & before  # torch loads it where it is installed
print(json.dumps([own, [m for m in new if m.split(".")[0] not in known]]))
"""

# What a trainer needs. What an engine, a GPU or a link needs comes when it is used.
SENDER = (
    *("client", "failure", "stages", "stats", "updater"),
    *(f"control.{name}" for name in ("channel", "journal", "mailbox", "request", "wait")),
    *(f"lora.{name}" for name in ("config", "merge", "names", "pairs")),
    *(f"copy.{name}" for name in ("alignment", "copier", "digest", "host", "table")),
    *("link.group_link", "memory.allocation", "memory.arena", "memory.handle", "plan.box", "plan.plan"),
    *(f"send.{name}" for name in ("adapter", "audience", "bucket", "fast", "fences", "fleet", "gather", "known")),
    *(f"send.{name}" for name in ("modules", "outgoing", "packing", "ranks", "sender", "shards", "source", "stock")),
    *("control", "copy", "link", "lora", "memory", "plan", "send"),
)


def loaded_by(module: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)], capture_output=True, check=True, text=True
    )
    return json.loads(done.stdout)


def test_import_loads_torch_and_the_senders_modules():
    own, other = loaded_by("tidemill_weight_update")
    assert own == sorted(["tidemill_weight_update", *(f"tidemill_weight_update.{name}" for name in SENDER)])
    assert other == []


def test_the_sglang_clients_do_not_load_sglang():
    own, other = loaded_by("tidemill_weight_update.sglang")
    clients = {f"tidemill_weight_update.sglang.{name}" for name in ("http", "launch", "local", "payload")}
    assert set(own) == {
        *("tidemill_weight_update", "tidemill_weight_update.sglang", *clients),
        *(f"tidemill_weight_update.{name}" for name in SENDER),
    }
    assert other == []


def test_exports_are_pinned():
    assert tidemill_weight_update.__all__ == [
        *("AdapterClient", "BucketHandle", "EngineClient", "GroupLink", "LocalShard", "LoraConfig", "PauseMode"),
        *("Request", "UpdateStats", "WeightUpdater", "merge_lora"),
    ]
    assert tidemill_weight_update.sglang.__all__ == ["HttpEngine", "LocalEngine", "sglang_launch_args"]
    assert all(hasattr(tidemill_weight_update, name) for name in tidemill_weight_update.__all__)
