"""Packing and micro-batches, without a process group."""

from functools import partial

import pytest
import torch
from engine_cases import make_batch
from tidemill_dataproto import DataProto, ragged
from tidemill_dataproto.balance import quadratic_workload
from tidemill_engines.batch.micro_batches import prepare_micro_batches, restore_order
from tidemill_engines.batch.packing import pack_rows

CPU = torch.device("cpu")


def test_rows_are_packed_without_padding_and_predictors_precede_labels():
    prompts = ragged.ragged(torch.tensor([10, 11, 12, 20, 30, 31]), [3, 1, 2, 0])
    responses = ragged.ragged(torch.tensor([13, 21, 22]), [1, 2, 0, 0])
    batch = DataProto.from_dict(
        {"input_ids": ragged.concat_rows(prompts, responses), "responses": responses}, meta_info={"temperature": 0.5}
    )
    inputs = pack_rows(batch, CPU)
    assert inputs.input_ids.tolist() == [[10, 11, 12, 13, 20, 21, 22, 30, 31]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    assert inputs.layout.cu_seqlens.tolist() == [0, 4, 7, 9]
    assert inputs.layout.max_length == 4
    assert inputs.layout.padded_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert inputs.predictors.tolist() == [2, 4, 5]
    assert inputs.labels.tolist() == [13, 21, 22]
    assert inputs.temperature == 0.5
    nothing = pack_rows(batch[0:0], CPU)
    assert nothing.input_ids.shape == (1, 1)
    assert nothing.predictors.numel() == nothing.labels.numel() == 0


@pytest.mark.parametrize("settings", [{"max_token_len": 20}, {"max_token_len": 20, "micro_batch_size": 3}])
@pytest.mark.parametrize("num_rows", [0, 1, 10])
def test_micro_batches_contain_each_row_once_and_restore_order(settings, num_rows):
    batch = make_batch(num_rows, seed=3)
    parts, indices = prepare_micro_batches(batch, **settings)
    padded, padded_indices = prepare_micro_batches(batch, **settings, num_micro_batches=len(parts) + 2)
    assert len(padded) == len(padded_indices) == len(parts) + 2
    for some, rows in ((parts, indices), (padded, padded_indices)):
        assert sorted(row for part in rows for row in part) == list(range(num_rows))
        assert [len(part) for part in some] == [len(part) for part in rows]
        if "micro_batch_size" not in settings:
            assert max(len(ragged.values(part["input_ids"])) for part in some) <= 20
        restored = restore_order([ragged.values(part["responses"]) for part in some], rows, batch["responses"])
        assert torch.equal(ragged.values(restored), ragged.values(batch["responses"]))
        assert torch.equal(ragged.lengths(restored), ragged.lengths(batch["responses"]))


def test_micro_batches_have_about_the_same_work_and_the_most_comes_first():
    lengths = [40, 30, *[10] * 11]  # of equal tokens, but the attention of the long rows needs more
    batch = DataProto.from_dict({"input_ids": ragged.ragged(torch.zeros(180, dtype=torch.int64), lengths)})
    work = partial(quadratic_workload, hidden_size=2)

    def spread(indices: list[list[int]]) -> int:
        totals = [int(work([lengths[row] for row in rows]).sum()) for rows in indices]
        assert totals == sorted(totals, reverse=True)
        return max(totals) - min(totals)

    _, balanced = prepare_micro_batches(batch, max_token_len=80, workload=work)
    _, by_tokens = prepare_micro_batches(batch, max_token_len=80)
    assert len(balanced) == len(by_tokens) == 3
    assert spread(balanced) < spread(sorted(by_tokens, key=lambda rows: -int(work([lengths[r] for r in rows]).sum())))


def test_too_few_micro_batches_are_rejected():
    batch = make_batch(10, seed=3)
    with pytest.raises(ValueError, match="must be at least 4 for 10 rows in micro-batches of 3; got 2"):
        prepare_micro_batches(batch, max_token_len=20, micro_batch_size=3, num_micro_batches=2)
    with pytest.raises(ValueError, match="micro-batches"):
        prepare_micro_batches(batch, max_token_len=20, num_micro_batches=2)
    with pytest.raises(ValueError, match="max_token_len=3"):
        prepare_micro_batches(batch, max_token_len=3)
