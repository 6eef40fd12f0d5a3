"""What the package loads and exports."""

import json
import subprocess
import sys

import tidemill_weight_update
import tidemill_weight_update.sglang

PROBE = """
import importlib, json, sys
import torch
before = set(sys.modules)
known = {*sys.stdlib_module_names, "torch", "tidemill_weight_update"}
known |= {"numpy"} & before  # torch loads it where it is installed
for module in sys.argv[1:]:
    importlib.import_module(module)
    new = sorted(set(sys.modules) - before)
    own = [m for m in new if m.startswith("tidemill")]
    print(json.dumps([own, [m for m in new if m.split(".")[0] not in known]]))
"""

# What a trainer needs. What an engine, a GPU or a link needs comes when it is used.
SENDER = (
    *("client", "failure", "stages", "stats", "updater"),
    *(f"control.{name}" for name in ("channel", "journal", "mailbox", "request", "wait")),
    *(f"lora.{name}" for name in ("config", "merge", "names", "pairs")),
    *(f"copy.{name}" for name in ("alignment", "copier", "digest", "host", "table", "tally")),
    *("link.group_link", "memory.allocation", "memory.arena", "memory.handle", "plan.box", "plan.plan"),
    *(f"send.{name}" for name in ("adapter", "asking", "audience", "bucket", "fast", "fences", "fleet", "gather")),
    *(
        f"send.{name}"
        for name in ("known", "modules", "outgoing", "packing", "plain", "ranks", "sender", "shards", "source")
    ),
    "send.stock",
    *("control", "copy", "link", "lora", "memory", "plan", "send"),
)


def test_import_loads_torch_and_the_senders_modules_and_no_sglang():
    modules = ["tidemill_weight_update", "tidemill_weight_update.sglang"]
    done = subprocess.run([sys.executable, "-c", PROBE, *modules], capture_output=True, check=True, text=True)
    (own, other), (own_with_clients, other_with_clients) = map(json.loads, done.stdout.splitlines())
    assert own == sorted(["tidemill_weight_update", *(f"tidemill_weight_update.{name}" for name in SENDER)])
    clients = {f"tidemill_weight_update.sglang.{name}" for name in ("flush", "http", "launch", "local", "payload")}
    assert set(own_with_clients) == {*own, "tidemill_weight_update.sglang", *clients}
    assert (other, other_with_clients) == ([], [])


def test_exports_are_pinned():
    assert tidemill_weight_update.__all__ == [
        *("AdapterClient", "BucketHandle", "EngineClient", "GroupLink", "HoldingClient", "LocalShard", "LoraConfig"),
        *("PauseMode", "PausingClient", "Request", "UpdateStats", "WeightUpdater", "merge_lora"),
    ]
    assert tidemill_weight_update.sglang.__all__ == ["HttpEngine", "LocalEngine", "sglang_launch_args"]
    assert all(hasattr(tidemill_weight_update, name) for name in tidemill_weight_update.__all__)
