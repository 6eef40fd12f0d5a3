"""For SGLang with `--enable-lora --lora-backend torch_native` where there is no GPU; Python loads it at its start.

SGLang 0.5.17 asks for pinned memory in its LoRA layers (`lora/layers.py`, `lora/backend/torch_backend.py`) whatever
the device is, and torch has none without CUDA; tidemill-sglang-cpu therefore refuses adapters. Nothing else is changed.
"""

from types import SimpleNamespace

import torch
from tidemill_sglang_cpu import support


def _unpinned(make):
    def plain(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return plain


def _check_arguments(server_args, check=support.check_arguments):
    check(SimpleNamespace(**vars(server_args) | {"enable_lora": False}))


torch.Tensor.pin_memory = lambda self, device=None: self
torch.tensor, torch.zeros = _unpinned(torch.tensor), _unpinned(torch.zeros)
support.check_arguments = _check_arguments
