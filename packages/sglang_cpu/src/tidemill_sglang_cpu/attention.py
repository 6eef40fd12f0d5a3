"""Attention of a whole batch in a few SDPA calls per layer, instead of torch_native's loop over requests."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Keys are padded to a multiple of this. It is a multiple of the vector width of every CPU, so the padding, which adds
# exact zeros, does not change the bits of a request's output.
_KEY_ALIGNMENT = 16
# Maximum number of queries of one request in one SDPA call; longer prompts are split.
_MAX_QUERIES = 64
# Maximum mask elements of one SDPA call [requests, heads, queries, keys]: 16 MiB in float32.
_MAX_MASK_ELEMENTS = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Blocks of queries that share one SDPA call: B blocks of at most T queries over at most L keys.

    Attributes:
        rows: [B * T] int64, rows of the packed queries; blocks shorter than T repeat their last row. None for all rows
            in order (decoding, one query per request).
        slots: [B * L] int64, slots of the KV pool, padded with the pool's dummy slot 0.
        mask: [B, 1, T, L], added to the scores: 0 where the query attends to the key, else -inf.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    mask: torch.Tensor


def plan_tiles(
    *,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    slot_table: torch.Tensor,
    num_heads: int,
    dtype: torch.dtype,
) -> list[Tile]:
    """Split a batch into tiles, once per forward pass; every layer uses the same tiles.

    Args:
        seq_lens: [R] int64, number of keys of each request, including those of its queries.
        query_lens: [R] int64, number of queries of each request: its last tokens, packed in request order.
        slot_table: [R, max_len], KV slots of request r in row r.
        num_heads: number of query heads; limits the size of a tile.
        dtype: dtype of the queries and the mask.
    """
    blocks_of = (query_lens + _MAX_QUERIES - 1) // _MAX_QUERIES
    request = torch.arange(len(seq_lens)).repeat_interleave(blocks_of)
    index = torch.arange(len(request)) - (blocks_of.cumsum(0) - blocks_of)[request]
    start = index * _MAX_QUERIES
    count = (query_lens[request] - start).clamp(max=_MAX_QUERIES)
    first_row = (query_lens.cumsum(0) - query_lens)[request] + start
    num_keys = seq_lens[request] - query_lens[request] + start + count

    groups = _group_blocks(num_keys, count, num_heads)
    whole = len(groups) == 1 and len(request) == int(query_lens.sum())
    tiles = []
    for group in [torch.arange(len(request))] if whole else groups:
        keys, queries = num_keys[group, None], count[group, None]
        query = torch.minimum(torch.arange(int(queries.max())), queries - 1)
        key = torch.arange(_aligned(int(keys.max())))
        slots = slot_table[request[group, None], key.clamp(max=slot_table.shape[1] - 1)]
        last_key = (keys - queries + query)[:, None, :, None]
        mask = torch.zeros((), dtype=dtype).where(key <= last_key, float("-inf"))
        tiles.append(
            Tile(
                rows=None if whole else (first_row[group, None] + query).flatten(),
                slots=slots.long().where(key < keys, 0).flatten(),
                mask=mask,
            )
        )
    return tiles


def _aligned(num_keys: int) -> int:
    return -(-num_keys // _KEY_ALIGNMENT) * _KEY_ALIGNMENT


def _group_blocks(num_keys: torch.Tensor, count: torch.Tensor, num_heads: int) -> list[torch.Tensor]:
    """Group blocks of similar length, so that padding at most doubles the work and the memory of a tile is bounded."""
    order = num_keys.argsort(stable=True)
    keys_of, count_of = num_keys[order].tolist(), count[order].tolist()
    groups, begin, width = [], 0, 0
    for i, (keys, queries) in enumerate(zip(keys_of, count_of, strict=True)):
        padded = _aligned(keys)
        elements = (i + 1 - begin) * max(width, queries) * padded * num_heads
        if i > begin and (padded > 2 * _aligned(keys_of[begin]) + 32 or elements > _MAX_MASK_ELEMENTS):
            groups.append(order[begin:i])
            begin, width = i, 0
        width = max(width, queries)
    groups.append(order[begin:])
    return groups


class BatchedAttnBackend(AttentionBackend):
    """Causal MHA/GQA attention over SGLang's paged KV pool, for extend and decode.

    With deterministic inference each query is passed as its own head (a GQA group with one query per head), so that its
    bits depend on its keys only: not on other requests, chunked prefill, or prefill versus decode.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        config = model_runner.model_config
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.num_heads = config.num_attention_heads // model_runner.server_args.tp_size
        self.dtype = config.dtype
        self.row_exact = model_runner.server_args.enable_deterministic_inference
        self.tiles: list[Tile] = []

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        seq_lens = forward_batch.seq_lens.long()
        if mode.is_decode():
            query_lens = torch.ones_like(seq_lens)
        else:
            assert forward_batch.extend_seq_lens is not None
            query_lens = forward_batch.extend_seq_lens.long()
        self.tiles = plan_tiles(
            seq_lens=seq_lens,
            query_lens=query_lens,
            slot_table=self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, : int(seq_lens.max())],
            num_heads=self.num_heads,
            dtype=self.dtype,
        )

    def forward_extend(  # pyright: ignore[reportIncompatibleMethodOverride]  # supported models pass no more
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attention of q [N, heads * dim] with k and v [N, kv heads, dim]; returns [N, heads * dim]."""
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER or layer.logit_cap > 0:
            raise NotImplementedError(
                f"this platform supports causal self-attention without a logit cap, but layer {layer.layer_id} has "
                f"{layer.attn_type}, cross attention {layer.is_cross_attention}, logit cap {layer.logit_cap}"
            )
        pool = self.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty_like(q)
        for tile in self.tiles:
            tile_q = q if tile.rows is None else q.index_select(0, tile.rows)
            result = attend_tile(tile_q, keys, values, tile, scale=layer.scaling, row_exact=self.row_exact)
            if tile.rows is None:
                out = result
            else:
                out.index_copy_(0, tile.rows, result)
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    # With prepared tiles, decoding is an extend by one token.
    forward_decode = forward_extend  # pyright: ignore[reportAssignmentType]

    def support_triton(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False


def attend_tile(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: Tile, *, scale: float, row_exact: bool
) -> torch.Tensor:
    """Attention of one tile.

    Args:
        q: [B * T, heads, dim].
        keys: [slots, kv heads, dim].
        values: [slots, kv heads, dim].
        tile: tile of the queries.
        scale: factor of the scores.
        row_exact: use one query per SDPA row (see `BatchedAttnBackend`); up to four times slower on long prompts.

    Returns:
        [B * T, heads, dim].
    """
    num_blocks, _, num_queries, num_keys = tile.mask.shape
    _, num_heads, dim = q.shape
    num_kv_heads = keys.shape[1]

    def gather(pool: torch.Tensor) -> torch.Tensor:
        rows = pool.view(-1, num_kv_heads * dim).index_select(0, tile.slots)
        return rows.view(num_blocks, num_keys, num_kv_heads, dim).transpose(1, 2)

    q = q.view(num_blocks, num_queries, num_heads, dim).transpose(1, 2)
    mask = tile.mask
    if row_exact and num_queries > 1:
        q = q.reshape(num_blocks, num_heads * num_queries, 1, dim)
        mask = mask.expand(-1, num_heads, -1, -1).reshape(num_blocks, num_heads * num_queries, 1, num_keys)
    out = scaled_dot_product_attention(q, gather(keys), gather(values), attn_mask=mask, scale=scale, enable_gqa=True)
    return out.view(num_blocks, num_heads, num_queries, dim).transpose(1, 2).reshape(-1, num_heads, dim)
