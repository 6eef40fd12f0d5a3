"""Heads, a plain computation of their outputs, and a record of allocations."""

from typing import Any

import pytest
import torch
from tidemill_engines.head.log_probs import Head
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

M, H, V = 23, 8, 37
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def plain(hidden, head, labels, *, temperature=1.0):
    logits = hidden @ head.weight.T + (0.0 if head.bias is None else head.bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[torch.arange(len(labels)), labels], -(log_p.exp() * log_p).sum(-1)


def make(dtype, *, num_tokens=M, bias=False, seed=0, device="cpu", **head):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    labels = torch.randint(0, V, (num_tokens,), generator=generator).to(device)
    return draw(num_tokens, H), Head(weight=draw(V, H), bias=draw(V) if bias else None, **head), labels


def gradients(outputs, inputs, *, seed=1):
    """Compute the gradients of a random combination of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64, device=outputs[0].device)
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device)
        total = total + (output.double() * weights).sum()
    return torch.autograd.grad(total, inputs, retain_graph=True)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "bias": {"bias": True, "temperature": 1.7},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0, "temperature": 0.8, "bias": True, "scale": 3.0},
}


def storages_of(tree):
    """Return the storage of plain tensors; wrapper tensors have none."""
    plain_tensors = (torch.Tensor, torch.nn.Parameter)
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if type(leaf) in plain_tensors]


class Allocations(TorchDispatchMode):
    """Record the largest tensor of any operation, and the peak bytes of such tensors."""

    def __init__(self):
        super().__init__()
        self.largest_bytes = self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in storages_of((args, kwargs))}
        out = func(*args, **({} if kwargs is None else kwargs))
        for storage in storages_of(out):
            if storage._cdata not in given:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest_bytes = max(self.largest_bytes, storage.nbytes())
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return out
