"""Faults that batch containers of other libraries have, each as a test that ours passes."""

import pickle

import numpy as np
import pytest
import torch
from batch_cases import make
from tidemill_dataproto import (
    DataProto,
    pad_dataproto_to_divisor,
    ragged,
    rearrange_micro_batches,
    unpad_dataproto,
)


def test_serialising_copies_no_tensor() -> None:
    batch = DataProto.from_dict({"x": torch.zeros(2, 1 << 17), "r": ragged.ragged(torch.zeros(1 << 18), [1 << 18, 0])})
    buffers: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(batch, 5, buffer_callback=buffers.append)) < 2000
    addresses = {np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers}
    assert {batch["x"].data_ptr(), ragged.values(batch["r"]).data_ptr()} <= addresses


def test_loading_a_file_runs_no_code(tmp_path) -> None:
    DataProto.from_dict({}, {"o": [range(3)]}).save_to_disk(tmp_path / "batch", allow_pickle=True)
    with pytest.raises(ValueError, match="loading runs code"):
        DataProto.load_from_disk(tmp_path / "batch")


@pytest.mark.parametrize(
    "operation", [lambda b: b.chunk(2)[1], lambda b: b[1:], lambda b: b.select(), lambda b: b.repeat(2)]
)
def test_parts_do_not_share_meta_info(operation) -> None:
    batch = make()
    operation(batch).meta_info["list"].append(2)
    assert batch.meta_info["list"] == [1]


def test_every_micro_batch_has_meta_info_of_its_own() -> None:
    batch = make()
    batch.batch["input_ids"] = batch["ids"]
    parts, _ = rearrange_micro_batches(batch, 2)
    assert len(parts) > 1
    parts[0].meta_info["list"].append(2)
    assert parts[1].meta_info == batch.meta_info == {"step": 1, "list": [1]}


def test_from_dict_and_folding_leave_their_inputs_alone() -> None:
    tensors, others, meta = {"x": torch.arange(4)}, {"o": [[1], [2], [3], [4]]}, {"list": []}
    batch = DataProto.from_dict(tensors, others, meta)
    before = batch.clone()
    folded = batch.fold(2)
    folded.meta_info["list"].append(1)
    folded.non_tensor_batch["o"][0].append(5)
    assert batch == before
    assert (list(tensors), others, meta) == (["x"], {"o": [[1], [2], [3], [4]]}, {"list": []})
    assert tensors["x"].shape == (4,)


def test_a_union_that_fails_has_changed_nothing() -> None:
    batch, before = make(), make()
    other = DataProto.from_dict({"new": torch.zeros(4), "x": torch.ones(4, dtype=torch.int64)})
    with pytest.raises(ValueError, match="'x'"):
        batch.union(other)
    assert batch == before


def test_concat_does_not_drop_columns_that_the_first_part_lacks() -> None:
    with pytest.raises(ValueError, match="'x' is missing from part 0"):
        DataProto.concat([make().select(["ids", "mask"]), make()])


def test_a_timing_in_its_last_digit_stops_no_run() -> None:
    parts = make().chunk(2)
    for part, seconds in zip(parts, (0.1, 0.1 + 1e-16), strict=True):
        part.meta_info["timing"] = {"generate": seconds}
        part.meta_info["metrics"] = {"loss": seconds}
    meta = DataProto.concat(parts).meta_info
    assert len(meta["timing"]) == len(meta["metrics"]) == 2
    assert DataProto.concat(parts, merge={"timing": "max"}).meta_info["timing"] == {"generate": 0.1 + 1e-16}


def test_lists_of_equal_length_stay_one_object_per_row() -> None:
    batch = DataProto.from_dict({}, {"c": [[1, 2], [3, 4]]})
    for new in (
        batch,
        batch.repeat(2),
        batch[[0]],
        DataProto.concat([batch, batch]),
        pickle.loads(pickle.dumps(batch)),
    ):
        assert new["c"].shape == (len(new),)
        assert new["c"][0] == [1, 2]


@pytest.mark.parametrize("lengths", [[3, 3, 3], [3], [0], [0, 0], []])
def test_rows_of_equal_length_and_single_rows_are_ordinary(lengths: list[int]) -> None:
    column = ragged.ragged(torch.arange(sum(lengths)), lengths)
    batch = DataProto.from_dict({"ids": column})
    for new in (
        DataProto.concat(batch.chunk(max(len(lengths), 1))),
        batch[list(range(len(lengths)))],
        batch[:],
        pickle.loads(pickle.dumps(batch)),
        batch.to("cpu"),
        DataProto.concat([batch[:0], batch]),
    ):
        assert ragged.lengths(new["ids"]).tolist() == lengths
        assert ragged.values(new["ids"]).tolist() == list(range(sum(lengths)))
        assert ragged.values(new["ids"] + 1).tolist() == list(range(1, sum(lengths) + 1))


def test_three_axes_of_position_ids_need_no_hint_where_the_rows_are_ragged() -> None:
    rows = [torch.arange(12).reshape(4, 3), torch.arange(12).reshape(4, 3) + 100]  # equally long
    batch = DataProto.from_dict({"position_ids": ragged.ragged_from_list(rows)})
    for new in (DataProto.concat(batch.chunk(2)), batch[[0, 1]], pickle.loads(pickle.dumps(batch))):
        for row, expected in zip(new, rows, strict=True):
            assert torch.equal(row.batch["position_ids"], expected)


def test_padding_enters_neither_loss_nor_groups_nor_metrics() -> None:
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


def test_inputs_of_other_kinds_are_found_in_whichever_half_they_are() -> None:
    batch = DataProto.from_dict({"ids": torch.arange(2)}, {"multi_modal_inputs": [{"pixels": torch.ones(2)}, {}]})
    assert batch["multi_modal_inputs"][0]["pixels"].tolist() == [1, 1]
    assert "multi_modal_inputs" in batch
