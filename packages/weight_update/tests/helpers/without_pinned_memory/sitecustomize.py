"""Makes SGLang run with `--enable-lora --lora-backend torch_native` without a GPU; Python imports it at startup.

SGLang 0.5.17 allocates pinned memory in its LoRA layers (`lora/layers.py`, `lora/backend/torch_backend.py`) for any
device, which torch does not support without CUDA. tidemill-sglang-cpu therefore refuses adapters. Nothing else changes.
"""

from types import SimpleNamespace

import torch
from tidemill_sglang_cpu import support


def _without_pin_memory(function):
    def plain(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    return plain


def _check_arguments(server_args, check=support.check_arguments):
    check(SimpleNamespace(**vars(server_args) | {"enable_lora": False}))


torch.Tensor.pin_memory = lambda self, device=None: self
torch.tensor, torch.zeros = _without_pin_memory(torch.tensor), _without_pin_memory(torch.zeros)
support.check_arguments = _check_arguments
