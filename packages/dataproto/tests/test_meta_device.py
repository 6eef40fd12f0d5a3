"""Operations on tensors of the meta device, which have no data: none of them reads a tensor."""

import pytest
import torch
from device_cases import LENGTHS, OPERATIONS, host_batch, index_arithmetic, on_device
from tidemill_dataproto import DataProto, ragged


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_on_batches_read_no_tensor(operation: str) -> None:
    result, expected = OPERATIONS[operation](on_device("meta")), OPERATIONS[operation](host_batch())
    for part, like in zip(result.chunk(2, allow_unequal=True), expected.chunk(2, allow_unequal=True), strict=True):
        for name, column in like.batch.items():
            assert part[name].device.type == "meta"
            assert part[name].dtype == column.dtype
            if column.is_nested:
                assert ragged.host_lengths(part[name]).tolist() == ragged.lengths(column).tolist()
                assert ragged.values(part[name]).shape == ragged.values(column).shape
            else:
                assert part[name].shape == column.shape
    assert result["uid"].tolist() == expected["uid"].tolist()


def test_index_arithmetic_reads_no_tensor() -> None:
    for ours, expected in zip(index_arithmetic(on_device("meta")), index_arithmetic(host_batch()), strict=True):
        assert (ours.shape, ours.dtype, ours.device.type) == (expected.shape, expected.dtype, "meta")


def test_lengths_are_known_without_reading_offsets() -> None:
    batch = on_device("meta")
    column = batch["input_ids"]
    for other in (column, column + 1, ragged.like(torch.zeros(sum(LENGTHS), device="meta"), column)):
        again = DataProto.from_dict({"c": other})
        assert ragged.host_lengths(again.chunk(4)[1]["c"]).tolist() == LENGTHS[2:4]
