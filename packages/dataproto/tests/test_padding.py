"""Padding rows are marked, do not affect training, and are removed by concat."""

import numpy as np
import pytest
import torch
from tidemill_dataproto import (
    DataProto,
    pad_dataproto_to_divisor,
    ragged,
    rearrange_micro_batches,
    restore_dynamic_batch,
    unpad_dataproto,
)


def make(n: int = 5) -> DataProto:
    responses = ragged.ragged(torch.arange(n * (n + 1) // 2), [n - i for i in range(n)])  # the last is the shortest
    return DataProto.from_dict(
        {
            "responses": responses,
            "response_mask": ragged.like(torch.ones(n * (n + 1) // 2), responses),
            "loss_mask": torch.ones(n, 2),
            "score": torch.arange(n) + 10.0,
        },
        {"uid": [f"u{i}" for i in range(n)], "ground_truth": np.array([f"g{i}" for i in range(n)])},
        {"step": 1},
    )


def test_padding_rows_copy_the_shortest_row_without_mask_and_group() -> None:
    batch = make()
    padded, size = pad_dataproto_to_divisor(batch, 4)
    assert size == 3
    assert ragged.lengths(padded["responses"]).tolist() == [5, 4, 3, 2, 1, 1, 1, 1]
    assert ragged.values(padded["responses"])[-3:].tolist() == [14] * 3
    assert ragged.values(padded["response_mask"]).sum() == ragged.values(batch["response_mask"]).sum()
    assert ragged.values(padded["response_mask"])[-3:].tolist() == [0, 0, 0]
    assert padded["loss_mask"][5:].sum() == 0
    assert padded["loss_mask"][:5].sum() == 10
    assert padded["uid"].tolist() == ["u0", "u1", "u2", "u3", "u4", None, None, None]
    assert padded["ground_truth"].tolist()[5:] == ["g4"] * 3
    assert padded.is_padding.tolist() == [False] * 5 + [True] * 3
    assert "8 rows, 3 padding" in repr(padded)
    assert batch == make()
    assert ragged.offsets(padded["responses"]) is ragged.offsets(padded["response_mask"])


def test_blank_keys_are_zero_or_empty_in_padding_rows() -> None:
    padded, _ = pad_dataproto_to_divisor(make(), 2, blank_keys=["score", "ground_truth", "none"])
    assert padded["score"].tolist()[4:] == [14.0, 0.0]
    assert padded["ground_truth"].tolist()[4:] == ["g4", ""]
    assert padded["uid"].tolist()[4:] == ["u4", None]


@pytest.mark.parametrize(
    "uid",
    [
        torch.tensor([0, 0, 1, 1, 2]),
        torch.tensor([-9, -9, -1, -1, -1], dtype=torch.int8),
        torch.tensor([0.0, 0.0, float("inf"), 3e38, 0.5]),
        ragged.ragged(torch.tensor([0, 0, 1, 2, 4]), [1] * 5),
        np.array([0, 0, 1, 1, 2]),
        np.array([7, 7, 0, 0, 253], dtype=np.uint8),
        np.array([0.0, 0.0, 1.5, 1.5, np.inf], dtype=np.float32),
        np.array(["a", "a", "b", "b", "c"]),
        ["a", "a", "b", "b", "c"],
    ],
)
def test_padding_rows_are_in_no_group_for_any_dtype_of_uid(uid) -> None:
    batch = make().select(None, []).union(DataProto.from_single_dict({"uid": uid}))
    padded, size = pad_dataproto_to_divisor(batch, 8)
    names = padded["uid"]
    names = (ragged.values(names) if isinstance(names, torch.Tensor) and names.is_nested else names).tolist()
    assert not set(names[:5]) & set(names[5:])
    assert padded["uid"].dtype == batch["uid"].dtype
    again, _ = pad_dataproto_to_divisor(padded, 9)
    assert again.is_padding.sum() == 4
    assert unpad_dataproto(padded, size) == batch


def test_group_keys_put_padding_rows_in_no_group() -> None:
    padded, _ = pad_dataproto_to_divisor(make(), 2, group_keys=["ground_truth", "score", "none"])
    assert padded["uid"].tolist()[4:] == ["u4", "u4"]
    assert padded["ground_truth"].tolist()[4:] == ["g4", ""]
    assert padded["score"][-1].isnan()


@pytest.mark.parametrize("uid", [torch.tensor([255, 0, 0], dtype=torch.uint8), np.array([True, False, False])])
def test_group_column_at_the_maximum_of_its_dtype_is_refused(uid) -> None:
    with pytest.raises(ValueError, match=r"column 'uid' is (torch.uint8|bool), which cannot hold (256|2)"):
        pad_dataproto_to_divisor(DataProto.from_single_dict({"uid": uid}), 2)


@pytest.mark.parametrize(
    "operation",
    [
        lambda b: b.select(["score"], []),
        lambda b: b.rename("score", "s"),
        lambda b: b.union(DataProto.from_dict({"new": torch.zeros(8)})),
        lambda b: DataProto.from_dict({"new": torch.zeros(8)}).union(b),
        lambda b: b.to("cpu"),
        lambda b: b.clone(),
        lambda b: b[:],
        lambda b: b.pop(["score"]),
        lambda b: DataProto._join(b.chunk(4), {}, None),
    ],
)
def test_padding_marks_survive_operations(operation) -> None:
    padded, _ = pad_dataproto_to_divisor(make(), 4)
    result = operation(padded)
    assert result.is_padding.tolist() == [False] * 5 + [True] * 3
    assert len(DataProto.concat([result])) == 5
    assert padded.is_padding.tolist() == [False] * 5 + [True] * 3


def test_padding_marks_move_with_their_rows() -> None:
    padded, size = pad_dataproto_to_divisor(make(), 4)
    moved = padded.reorder(list(range(8))[::-1])
    assert moved.is_padding.tolist() == [True] * 3 + [False] * 5
    assert unpad_dataproto(moved, size) == make()[::-1]
    assert padded.repeat(2).is_padding.tolist() == [False] * 10 + [True] * 6
    assert padded[5:].is_padding.all()
    padded.is_padding[:] = True  # a copy
    assert padded.is_padding.sum() == 3


def test_without_padding() -> None:
    padded, size = pad_dataproto_to_divisor(make(), 4)
    real = padded[::-1].without_padding()
    assert real == make()[::-1]
    assert unpad_dataproto(real, size) == real  # the padding is known to be removed
    batch = make()
    same = batch.without_padding()
    assert same == batch
    assert same["score"].data_ptr() == batch["score"].data_ptr()
    same.meta_info["step"] = 2
    same.non_tensor_batch.pop("uid")
    assert batch == make()


def test_micro_batches_keep_padding_and_concat_drops_it() -> None:
    padded, size = pad_dataproto_to_divisor(make(), 4)
    parts, indices = rearrange_micro_batches(padded, 6, length_key="responses")
    assert sum(part.is_padding.sum() for part in parts) == 3
    restored = restore_dynamic_batch(parts, indices)
    assert restored == padded
    assert unpad_dataproto(restored, size) == make()
    assert len(DataProto.concat(parts)) == 5


@pytest.mark.parametrize("uid", [["a", "b", "c"], np.array(["a", "b", "c"]), torch.tensor([0, 0, 1])])
def test_padding_rows_are_independent_in_grouped_micro_batches(uid) -> None:
    ids = ragged.ragged(torch.arange(15), [5] * 3)
    padded, size = pad_dataproto_to_divisor(DataProto.from_single_dict({"input_ids": ids, "uid": uid}), 8)
    assert size == 5
    parts, indices = rearrange_micro_batches(padded, 10, group_key="uid")
    assert [len(part) for part in parts] == [2] * 4
    assert restore_dynamic_batch(parts, indices) == padded
    with pytest.raises(ValueError, match=r"the group ('a'|0) has"):
        rearrange_micro_batches(padded, 4, group_key="uid")
    with pytest.raises(ValueError, match="row 0 has 5 tokens"):
        rearrange_micro_batches(padded[padded.is_padding], 4, group_key="uid")


def test_mean_of_meta_info_ignores_padding() -> None:
    padded, _ = pad_dataproto_to_divisor(make(), 4)
    parts = padded.chunk(2)
    for part in parts:
        part.meta_info["score"] = float(np.mean([item.batch["score"] for item in part]))
    joined = DataProto.concat(parts, merge={"score": "mean"})
    assert joined.meta_info["score"] == pytest.approx(make()["score"].mean().item())
    assert joined["score"].tolist() == make()["score"].tolist()


def test_unpad_removes_the_last_rows_of_an_unmarked_batch() -> None:
    padded, size = pad_dataproto_to_divisor(make(), 4)
    result = DataProto.from_dict({"value": padded["score"]})
    assert unpad_dataproto(result, size)["value"].tolist() == make()["score"].tolist()
    assert unpad_dataproto(result, 0) == result


def test_padding_a_padded_batch() -> None:
    once, first = pad_dataproto_to_divisor(make(), 4)
    twice, second = pad_dataproto_to_divisor(once, 9)
    assert (first, second) == (3, 1)
    assert twice.is_padding.tolist() == [False] * 5 + [True] * 4
    assert unpad_dataproto(twice, second) == once
    assert unpad_dataproto(unpad_dataproto(twice, second), first) == make()
    empty, none = pad_dataproto_to_divisor(DataProto(), 4)
    assert (len(empty), none) == (0, 0)


def test_invalid_padding_calls_are_refused_with_a_message() -> None:
    padded, _ = pad_dataproto_to_divisor(make(), 4)
    with pytest.raises(ValueError, match="size_divisor >= 1, got 0"):
        pad_dataproto_to_divisor(make(), 0)
    with pytest.raises(ValueError, match="expected 2 padding rows, got a batch with 3"):
        unpad_dataproto(padded[::-1], 2)
    with pytest.raises(ValueError, match="from 0 to 5"):
        unpad_dataproto(make(), 6)
    with pytest.raises(ValueError, match="from 0 to 5"):
        unpad_dataproto(make(), -1)
    with pytest.raises(ValueError, match="got 3 padding rows; call unpad_dataproto"):
        padded.fold(2)
    folded, _ = pad_dataproto_to_divisor(make().select(None, []).repeat(2).fold(2), 4)
    with pytest.raises(ValueError, match="got 3 padding rows; call unpad_dataproto"):
        folded.unfold()
    with pytest.raises(ValueError, match="the same padding rows in both batches"):
        padded.union(padded.reorder(list(range(8))[::-1]).select(["score"], []).rename("score", "other"))
    padded.batch = make().batch
    with pytest.raises(ValueError, match="'padding marks': 8"):
        padded.check_consistency()


def test_padding_affects_neither_loss_nor_groups_nor_metrics() -> None:
    responses = ragged.ragged(torch.arange(5), [2, 1, 2])
    batch = DataProto.from_dict(
        {"responses": responses, "response_mask": ragged.like(torch.ones(5), responses), "score": torch.arange(3.0)},
        {"uid": ["a", "b", "b"]},
    )
    padded, size = pad_dataproto_to_divisor(batch, 4)
    assert ragged.values(padded["response_mask"]).sum() == 5
    assert (padded["uid"] == "b").sum() == 2
    assert sum(item.batch["score"] for item in padded) == 3.0
    assert DataProto.concat(padded.chunk(2)) == unpad_dataproto(padded, size) == batch
