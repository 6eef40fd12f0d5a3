"""Arithmetic of buckets and shards, without processes or shared memory."""

import itertools

import pytest
import torch
from tidemill_weight_update.copy.table import ALIGNMENT
from tidemill_weight_update.send.stock import plan_buckets
from tidemill_weight_update.tensors import LocalShard, shard_range

PARTS = ["attn.q.weight", "attn.kv.weight", "attn.kv.scale", "mlp.up.weight"]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.complex128]


def tensors(seed: int, count: int = 40) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 60, (count, 2), generator=generator).tolist()
    return [(f"t{i}", torch.zeros(*size, dtype=DTYPES[i % len(DTYPES)])) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 5_000, 1 << 30])
@pytest.mark.parametrize("seed", range(3))
def test_buckets_contain_every_tensor_once_in_order_within_the_limit(seed, bucket_bytes):
    items = tensors(seed)
    buckets = list(plan_buckets(items, bucket_bytes))
    assert [entry.name for bucket in buckets for entry in bucket.entries] == [name for name, _ in items]
    assert [id(t) for bucket in buckets for t in bucket.tensors] == [id(t) for _, t in items]
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert [bucket.is_last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    assert sum(bucket.payload_bytes for bucket in buckets) == sum(t.numel() * t.element_size() for _, t in items)
    for bucket in buckets:
        assert bucket.num_bytes <= bucket_bytes or len(bucket.entries) == 1
        assert bucket.num_bytes == bucket.entries[-1].end
        for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
            assert entry.start % ALIGNMENT == 0
            assert (entry.num_bytes, entry.shape) == (tensor.numel() * tensor.element_size(), tuple(tensor.shape))
        for left, right in itertools.pairwise(bucket.entries):
            assert left.end <= right.start
    for left, right in itertools.pairwise(buckets):  # greedy: the next tensor did not fit
        assert left.num_bytes + right.entries[0].num_bytes > bucket_bytes - ALIGNMENT


def test_entries_of_one_bucket_do_not_overlap():
    (bucket,) = plan_buckets(tensors(0), 1 << 30)
    arena = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for entry in bucket.entries:
        assert (entry.view(arena) == 0).all()
        entry.view(arena).fill_(1)


def test_tensor_larger_than_the_limit_gets_its_own_bucket():
    items = [("a", torch.zeros(4)), ("big", torch.zeros(1000)), ("b", torch.zeros(4)), ("c", torch.zeros(4))]
    plan = [[entry.name for entry in bucket.entries] for bucket in plan_buckets(items, 256)]
    assert plan == [["a"], ["big"], ["b", "c"]]


def test_tensors_of_one_module_share_a_bucket_of_any_size():
    names = ["embed.weight", *(f"layers.{i}.{part}" for i in range(2) for part in PARTS), "norm.weight"]
    plan = plan_buckets([(name, torch.zeros(20)) for name in names], 256)
    assert [[entry.name for entry in bucket.entries] for bucket in plan] == [
        ["embed.weight"],
        ["layers.0.attn.q.weight", "layers.0.attn.kv.weight", "layers.0.attn.kv.scale"],
        ["layers.0.mlp.up.weight"],
        ["layers.1.attn.q.weight", "layers.1.attn.kv.weight", "layers.1.attn.kv.scale"],
        ["layers.1.mlp.up.weight", "norm.weight"],
    ]


def test_scattered_tensors_of_one_module_are_grouped_in_a_collection():
    names = ["0.attn.q_a.weight", "0.mlp.up.weight", "0.attn.kv_a.weight", "1.attn.q_a.weight", "0.mlp.down.weight"]
    buckets = list(plan_buckets([(name, torch.zeros(8)) for name in names], bucket_bytes=1))
    assert [[entry.name for entry in bucket.entries] for bucket in buckets] == [
        ["0.attn.q_a.weight", "0.attn.kv_a.weight"],
        ["0.mlp.up.weight", "0.mlp.down.weight"],
        ["1.attn.q_a.weight"],
    ]


def test_cast_applies_to_floating_point_tensors_only():
    items = [
        ("w", torch.zeros(3)),
        ("h", torch.zeros(3, dtype=torch.float16)),
        ("i", torch.zeros(3, dtype=torch.int32)),
    ]
    (bucket,) = plan_buckets(items, 1 << 20, torch.bfloat16)
    assert [entry.dtype for entry in bucket.entries] == [torch.bfloat16, torch.bfloat16, torch.int32]
    assert bucket.payload_bytes == 6 + 6 + 12


def test_planning_reads_at_most_one_module_ahead():
    taken = []

    def items():
        for i in range(10):
            taken.append(i)
            yield f"t{i}", torch.zeros(16)

    buckets = plan_buckets(items(), 128)
    next(buckets)
    assert taken == [0, 1, 2, 3]  # tensor 3 shows that the module of tensor 2 is complete


def test_digest_depends_on_names_shapes_dtypes_order_and_context():
    base = [("a", torch.zeros(2, 3)), ("b", torch.zeros(6))]
    variants = [
        base,
        [("a", torch.zeros(3, 2)), base[1]],
        [("x", torch.zeros(2, 3)), base[1]],
        [("a", torch.zeros(2, 3, dtype=torch.int32)), base[1]],
        base[::-1],
        base[:1],
    ]
    digests = [next(plan_buckets(items, 1 << 20)).digest("1") for items in variants]
    digests.append(next(plan_buckets(base, 1 << 20)).digest("2"))
    assert len(set(digests)) == len(digests)
    assert next(plan_buckets(base, 1 << 20)).digest("1") == digests[0]
    assert all(-(2**63) <= digest < 2**63 for digest in digests)


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([], ValueError, "empty iterable"),
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], ValueError, "'a' was passed twice"),
        (["a"], TypeError, r"\(name, tensor\) pairs, got 'a'; for a dict pass .items()"),
        ([("a", torch.zeros(1), 3)], TypeError, "pairs"),
        ([("a", [1.0])], TypeError, r"got \('a', list\)"),
        ([(1, torch.zeros(1))], TypeError, r"got \(1, Tensor\)"),
        ([("a", torch.zeros(2, 2).to_sparse())], TypeError, "'a' must be dense"),
        ([("a", torch.zeros(2, 2, device="meta"))], TypeError, "'a' must be dense and have data.*meta"),
        (
            [("a", LocalShard(tensor=torch.zeros(2), global_shape=(2,), start=(0,)))],
            TypeError,
            "'a' is a LocalShard, which only engines launched with",
        ),
    ],
)
def test_invalid_tensors_are_refused_by_name(items, error, message):
    with pytest.raises(error, match=message):
        list(plan_buckets(items, 100))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [0, 1, 2, 5, 6, 64])
def test_shard_range_matches_torch_chunk(size, num_ranks):
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(num_ranks)]
    chunks += [[] for _ in range(num_ranks - len(chunks))]
    for rank, chunk in enumerate(chunks):
        start, length = shard_range(size, rank, num_ranks)
        assert list(range(start, start + length)) == chunk
