"""Slow imports (torch, transformers, the engines), done once in the server from which `run_ranks` forks ranks."""

import gc
import warnings
from importlib import import_module
from importlib.util import find_spec

_MODULES = ["tensordict", "torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3"]
if find_spec("tidemill_engines") is not None:
    _MODULES.append("tidemill_engines.fsdp2.language_model")
    if find_spec("megatron.core") is not None:
        _MODULES.append("tidemill_engines.megatron.language_model")

with warnings.catch_warnings(action="ignore"):  # Megatron warns that Transformer Engine and Apex are not installed
    for _name in _MODULES:
        import_module(_name)
gc.freeze()  # keeps these objects out of the garbage collection of the ranks
