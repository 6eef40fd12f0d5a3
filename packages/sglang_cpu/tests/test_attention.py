"""Batched attention, compared with one dense SDPA call per request."""

import pytest
import torch
from tidemill_sglang_cpu.attention import attend_tile, plan_tiles
from torch.nn.functional import scaled_dot_product_attention

KV_HEADS, GROUP, DIM, POOL = 2, 3, 8, 4096
HEADS = KV_HEADS * GROUP


class Batch:
    """Requests with random keys at random slots of a pool; slot 0 and unused slots hold NaN."""

    def __init__(self, seq_lens, query_lens, dtype=torch.float32, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.seq_lens, self.query_lens = torch.tensor(seq_lens), torch.tensor(query_lens)
        self.slot_table = torch.randint(0, POOL, (len(seq_lens), max(seq_lens)), dtype=torch.int32, generator=g)
        used = torch.randperm(POOL - 1, generator=g)[: sum(seq_lens)].to(torch.int32) + 1
        for row, part in zip(self.slot_table, used.split(seq_lens), strict=True):
            row[: len(part)] = part
        self.keys = torch.full((POOL, KV_HEADS, DIM), float("nan"))
        self.values = self.keys.clone()
        self.keys[used.long()] = torch.randn(len(used), KV_HEADS, DIM, generator=g)
        self.values[used.long()] = torch.randn(len(used), KV_HEADS, DIM, generator=g)
        self.keys[0] = self.values[0] = 0.0
        self.q = torch.randn(sum(query_lens), HEADS, DIM, generator=g).to(dtype)
        self.keys, self.values = self.keys.to(dtype), self.values.to(dtype)

    def run(self, row_exact=False):
        tiles = plan_tiles(
            seq_lens=self.seq_lens,
            query_lens=self.query_lens,
            slot_table=self.slot_table,
            num_heads=HEADS,
            dtype=self.q.dtype,
        )
        out = torch.full_like(self.q, float("nan"))
        for tile in tiles:
            rows = torch.arange(len(self.q)) if tile.rows is None else tile.rows
            out[rows] = attend_tile(self.q[rows], self.keys, self.values, tile, scale=0.3, row_exact=row_exact)
        return out

    def reference(self):
        parts = []
        for slots, total, q in zip(self.slot_table, self.seq_lens, self.q.split(self.query_lens.tolist()), strict=True):
            k, v = (x[slots[:total].long()].transpose(0, 1)[None] for x in (self.keys, self.values))
            visible = torch.arange(total) <= torch.arange(total - len(q), total)[:, None]
            out = scaled_dot_product_attention(
                q.transpose(0, 1)[None], k, v, attn_mask=visible, scale=0.3, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


CASES = {
    "decode": ([5, 17, 33, 1], [1, 1, 1, 1]),
    "decode_lengths_far_apart": ([2, 900, 3, 40], [1, 1, 1, 1]),
    "prefill": ([9, 3, 16, 1], [9, 3, 16, 1]),
    "prefill_longer_than_a_block": ([200, 64, 65, 7], [200, 64, 65, 7]),
    "extend_of_cached_prefixes": ([30, 200, 12], [5, 130, 1]),
    "one_request": ([1], [1]),
}


@pytest.mark.parametrize("row_exact", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_batched_attention_equals_attention_per_request(case, row_exact):
    batch = Batch(*CASES[case])
    torch.testing.assert_close(batch.run(row_exact), batch.reference(), atol=2e-6, rtol=1e-5)


def test_bfloat16_attention_equals_attention_per_request():
    batch = Batch(*CASES["extend_of_cached_prefixes"], dtype=torch.bfloat16)
    torch.testing.assert_close(batch.run(), batch.reference(), atol=2e-2, rtol=2e-2)


def test_large_batch_is_split_into_bounded_tiles():
    seq_lens = torch.full((300,), 500)
    tiles = plan_tiles(
        seq_lens=seq_lens,
        query_lens=torch.full((300,), 40),
        slot_table=torch.ones(300, 500, dtype=torch.int32),
        num_heads=8,
        dtype=torch.float32,
    )
    assert max(tile.mask.numel() * 8 for tile in tiles) <= 4 << 20
    assert sum(tile.mask.shape[0] for tile in tiles) == 300


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_exact_attention_is_independent_of_batch_and_chunking(one_thread, dtype):
    seq_lens = [7, 150, 33, 80]
    whole = Batch(seq_lens, seq_lens, dtype=dtype)
    expected = whole.run(row_exact=True).split(seq_lens)
    for i, total in enumerate(seq_lens):
        q = whole.q.split(seq_lens)[i]
        for queries in sorted({1, 2, total // 2, total}):  # decode, and prefills after a cached prefix
            alone = Batch(seq_lens, seq_lens, dtype=dtype)
            alone.slot_table = whole.slot_table[i : i + 1]
            alone.seq_lens, alone.query_lens = torch.tensor([total]), torch.tensor([queries])
            alone.q = q[-queries:]
            assert torch.equal(alone.run(row_exact=True), expected[i][-queries:]), (i, queries)
