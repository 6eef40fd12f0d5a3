"""Hashes of weights, to compare two runs bit for bit."""

import hashlib
from collections.abc import Iterable

import torch
from tidemill_engines import WeightShard
from torch.distributed.tensor import DTensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


def weight_hash(shards: Iterable[tuple[str, torch.Tensor | WeightShard]]) -> str:
    """Return a hash of the parts of the weights that a rank holds: 16 hexadecimal digits.

    It depends on names, shapes, dtypes and bits. It is computed where the weights are, at the speed of their memory.
    A change of one element always changes it; it is not cryptographic.

    Args:
        shards: names and parts, such as the result of `BaseEngine.get_per_tensor_shards`.
    """
    about: list[str] = []
    sums: list[torch.Tensor] = []
    for name, shard in shards:
        tensor = shard.tensor if isinstance(shard, WeightShard) else shard
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        about.append(f"{name} {tuple(local.shape)} {local.dtype}")
        sums.append(_sum(local.detach()))
    values = torch.stack(sums).tolist() if sums else []
    text = "\n".join(f"{each} {value}" for each, value in zip(about, values, strict=True))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bits, each times an odd factor of its position, modulo 2**64: int64 []."""
    bits = tensor.contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK]
        factors = torch.arange(start + 1, start + 1 + len(chunk), device=bits.device) * _FACTOR
        factors ^= factors >> 32
        total += (chunk.to(torch.int64) * (factors | 1)).sum()
    return total
