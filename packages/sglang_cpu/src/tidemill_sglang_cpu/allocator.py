"""Allocator of KV cache slots."""

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache


class TokenAllocator(TokenToKVPoolAllocator):
    """SGLang's token allocator with the signature that SGLang requires of a platform's allocator."""

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: KVCache, need_sort: bool
    ) -> None:
        if page_size != 1:
            raise ValueError(f"page_size must be 1, got {page_size}: leave SGLang's page_size at its default")
        super().__init__(size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort)
