"""Collective operations; the error of one rank is raised on all ranks."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from tidemill_dataproto import DataProto, all_gather, compat, pad_dataproto_to_divisor, prepare_dynamic_batch, ragged
from tidemill_testing import run_ranks

ROWS = [3, 0, 1, 2]


def shard(rank: int) -> DataProto:
    n = ROWS[rank]
    lengths = [rank + i for i in range(n)]
    ids = ragged.ragged(torch.arange(sum(lengths)) + 100 * rank, lengths)
    flags = ragged.like(torch.ones(sum(lengths), dtype=torch.bool), ids)
    wide = ragged.ragged(torch.arange(6 * n, dtype=torch.bfloat16).reshape(2 * n, 3), [2] * n)
    tensors = {"ids": ids, "flags": flags, "wide": wide, "x": torch.full((n, 2), float(rank), dtype=torch.float64)}
    others = {"uid": [{"rank": rank, "row": i} for i in range(n)], "n": np.arange(n)}
    return DataProto.from_dict(tensors, others, {"step": 1, "metrics": {"rank": rank}})


def gather_shards() -> Any:
    import torch.distributed as dist

    rank = dist.get_rank()
    mine = shard(rank)
    got = all_gather(mine)
    assert mine == shard(rank)
    assert ragged.offsets(got["ids"]) is ragged.offsets(got["flags"])
    return got


def test_all_gather_of_unequal_batches_is_concat_on_every_rank() -> None:
    expected = DataProto.concat([shard(rank) for rank in range(4)])
    for got in run_ranks(gather_shards, 4):
        assert got == expected


def gather_in_groups() -> Any:
    import torch.distributed as dist

    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    part = all_gather(shard(rank), groups[rank % 2])
    bare = all_gather(shard(rank) if rank == 3 else DataProto())
    padded = all_gather(pad_dataproto_to_divisor(shard(rank), 2)[0])
    empty = all_gather(DataProto())
    return part, bare, padded, empty


def test_all_gather_in_groups_and_of_empty_and_padded_batches() -> None:
    for rank, (part, bare, padded, empty) in enumerate(run_ranks(gather_in_groups, 4)):
        assert part == DataProto.concat([shard(rank % 2), shard(rank % 2 + 2)])
        assert bare == DataProto.concat([shard(3)])
        assert padded == DataProto.concat([shard(r) for r in range(4)])
        assert len(empty) == 0


def other_columns(rank: int) -> None:
    all_gather(shard(rank).rename("x", "y") if rank == 1 else shard(rank))


def other_facts(rank: int) -> None:
    batch = shard(rank)
    batch.meta_info["step"] = 2 if rank == 1 else 1
    all_gather(batch)


def inconsistent(rank: int) -> None:
    batch = shard(rank)
    if rank == 1:
        batch.non_tensor_batch["late"] = np.zeros(7)
    all_gather(batch)


def above_the_cap(rank: int) -> None:
    import torch.distributed as dist

    ids = ragged.ragged(torch.arange(9), [9] if rank == 1 else [3, 3, 3])
    prepare_dynamic_batch(DataProto.from_dict({"input_ids": ids}), 8, dist.group.WORLD)


def unknown_key(rank: int) -> None:
    import torch.distributed as dist

    prepare_dynamic_batch(shard(rank), 8, dist.group.WORLD, length_key="none" if rank == 1 else "ids")


def unpicklable(rank: int) -> None:
    batch = shard(rank)
    batch.meta_info["hook"] = (lambda: None) if rank == 1 else None
    all_gather(batch)


def odd_workload(rank: int) -> None:
    import torch.distributed as dist

    def work(rows: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise OverflowError("too long")
        return rows

    prepare_dynamic_batch(shard(rank), 8, dist.group.WORLD, length_key="ids", workload=work)


CASES = [
    (other_columns, "'x' is missing from part 1"),
    (other_facts, r"in part 0, but 2 in part 1"),
    (inconsistent, "rank 1 of 4: ValueError: expected the same number of rows"),
    (above_the_cap, "rank 1 of 4: ValueError: row 0 has 9 tokens, more than max_token_len=8"),
    (unknown_key, "rank 1 of 4: KeyError: .*no column 'none'"),
    (odd_workload, "rank 1 of 4: OverflowError: too long"),
    (unpicklable, "rank 1 of 4: TypeError: expected objects that can be pickled"),
]


def errors_of_all_cases() -> list[str]:
    import torch.distributed as dist

    texts = []
    for call, _ in CASES:
        with pytest.raises(ValueError, match=r"rank 1|part 1") as caught:
            call(dist.get_rank())
        dist.barrier()  # fails if a rank still waits in another collective
        texts.append(str(caught.value))
    return texts


def test_error_of_one_rank_is_raised_on_all() -> None:
    by_rank = run_ranks(errors_of_all_cases, 4, timeout_s=60)
    assert all(texts == by_rank[0] for texts in by_rank)
    for (_, message), text in zip(CASES, by_rank[0], strict=True):
        assert re.search(message, text)


def micro_batches_of_rank() -> Any:
    import torch.distributed as dist

    rank = dist.get_rank()
    lengths = [[5, 5, 5, 5, 5, 5, 5], [1], [], [6, 2]][rank]
    batch = DataProto.from_dict({"input_ids": ragged.ragged(torch.arange(sum(lengths)), lengths)})
    parts, indices = prepare_dynamic_batch(batch, 10, dist.group.WORLD, num_batches_divided_by=3)
    alone, _ = prepare_dynamic_batch(batch, 10)
    return [len(part) for part in parts], indices, len(alone)


def test_prepare_dynamic_batch_makes_the_same_number_on_every_rank() -> None:
    results = run_ranks(micro_batches_of_rank, 4)
    assert [len(sizes) for sizes, _, _ in results] == [6] * 4  # 4 are needed, 6 divide by 3
    assert [sum(sizes) for sizes, _, _ in results] == [7, 1, 0, 2]
    assert [sorted(row for rows in indices for row in rows) for _, indices, _ in results] == [
        list(range(7)), [0], [], [0, 1]
    ]  # fmt: skip
    assert [alone for _, _, alone in results] == [4, 1, 1, 1]


def gather_in_place() -> tuple[list[list[int]], list[int], dict[str, int]]:
    import torch.distributed as dist

    rank = dist.get_rank()
    ids = ragged.ragged(torch.arange(rank + 1), [rank + 1])
    batch = DataProto.from_dict({"ids": ids}, {"rank": [rank]}, {"rank": rank})
    compat.all_gather_data_proto(batch)
    return [row.tolist() for row in batch["ids"].unbind()], batch["rank"].tolist(), batch.meta_info


def test_compat_all_gather_data_proto_replaces_the_rows_in_place() -> None:
    assert run_ranks(gather_in_place, 2) == [([[0], [0, 1]], [0, 1], {"rank": rank}) for rank in range(2)]
